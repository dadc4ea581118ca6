"""Names of the data sets that come with the package, and of their classes."""

from typing import Any

FEDERATIONS = ("shakespeare", "insteval", "movielens", "chem97", "rwm5yr")  # real ones: they name their clients
BUILT_IN = ("digits", "cifar10", "fashion_mnist", *FEDERATIONS)
CLASS_NAMES = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "fashion_mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
}  # fmt: skip


def built_in_name(source: Any) -> Any:
    """Returns the name of a built-in source as it is spelled here: fashion-mnist will do for fashion_mnist."""
    spelled = str(source).replace("-", "_")
    return spelled if spelled in BUILT_IN else source
