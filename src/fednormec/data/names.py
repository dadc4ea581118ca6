"""Names of the data sets that come with the package."""

from typing import Any

FEDERATIONS = ("shakespeare", "insteval", "movielens", "chem97", "rwm5yr")  # real ones: they name their clients
BUILT_IN = ("digits", "cifar10", "fashion_mnist", *FEDERATIONS)


def built_in_name(source: Any) -> Any:
    """Returns the name of a built-in source as it is spelled here: fashion-mnist will do for fashion_mnist."""
    spelled = str(source).replace("-", "_")
    return spelled if spelled in BUILT_IN else source
