"""The functions in C as another process finds them."""

import os
import shutil
import subprocess
import sys

import pytest


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_where_there_is_a_compiler_they_are_compiled():
    code = "from fednormec.core import kernels; print(kernels.library() is not None)"
    for setting, expected in (("1", "True"), ("0", "False")):
        env = os.environ | {"FEDNORMEC_KERNELS": setting}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.stdout.strip() == expected, done.stderr
