"""Where things lie in the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "examples" / "not_private.toml"
