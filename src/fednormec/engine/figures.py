"""Figures of a model by name: what they are called, how they are written, and which way is better."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

TEST, CLIENT = "test_", "client_"
OWN = "own_"  # of each client's own model, where clients have one
AVERAGED = "_averaged"  # ending of a figure of the averaged model
TENTHS = {"_worst": "worst tenth", "_best": "best tenth"}  # of the clients, over which a figure's mean is taken
OVER, OF_OWN = " over clients", " of own models"


class Figure(NamedTuple):
    """Figure of a model.

    Attributes:
        words: what it is called.
        form: format of its number.
        higher: whether a higher one is better.
    """

    words: str
    form: str
    higher: bool

    @property
    def short(self) -> str:
        """Name for a line with little room: what is measured on a test set need not say so, but for the loss."""
        return {"test loss": "test loss", "train loss": "loss"}.get(self.words, self.words.removeprefix("test "))

    @property
    def is_share(self) -> bool:
        """True if it is written in percent."""
        return self.form.endswith("%")


KNOWN = {
    "test_accuracy": Figure("test accuracy", ".1%", True),
    "test_auc": Figure("test AUC", ".4f", True),
    "test_rmse": Figure("test RMSE", ".4g", False),
    "test_mae": Figure("test MAE", ".4g", False),
    "test_top5": Figure("test top 5", ".1%", True),
    "test_loss": Figure("test loss", ".4f", False),
    "gradient_norm": Figure("gradient norm", ".3e", False),
    "train_loss": Figure("train loss", ".4f", False),
}
BEFORE_LOSS = [name for name in KNOWN if name.startswith(TEST) and name != "test_loss"]


def figure_of(name: str) -> Figure:
    """Returns what is known of a figure; a higher one of the user's own metrics is better.

    >>> figure_of("test_accuracy").form, figure_of("test_macro_recall").words, figure_of("memory_error").higher
    ('.1%', 'test macro recall', False)
    >>> figure_of("client_accuracy").words, figure_of("client_rmse_worst").words
    ('accuracy over clients', 'RMSE, worst tenth of clients')
    >>> figure_of("own_accuracy").words, figure_of("own_rmse_worst").words
    ('accuracy of own models', 'RMSE of own models, worst tenth of clients')
    >>> figure_of("test_accuracy_averaged").words
    'test accuracy, average'
    """
    if name.endswith(AVERAGED):
        kin = figure_of(name.removesuffix(AVERAGED))
        return kin._replace(words=f"{kin.words}, average")
    for begin, among, all_of_them in ((CLIENT, "", OVER), (OWN, OF_OWN, OF_OWN)):
        if name.startswith(begin):
            end = next((end for end in TENTHS if name.endswith(end)), "")
            kin = figure_of(f"{TEST}{name.removeprefix(begin).removesuffix(end)}")
            which = f"{among}, {TENTHS[end]} of clients" if end else all_of_them
            return kin._replace(words=f"{kin.words.removeprefix('test ')}{which}")
    return KNOWN.get(name) or Figure(name.replace("_", " "), ".4g", name.startswith(TEST))


def may_be_public(name: str) -> bool:
    """Returns whether a figure is public if the test set is; every other looks at clients' data."""
    return name.startswith(TEST) or name == "epsilon"


def by_importance(names: Iterable[str]) -> list[str]:
    """Returns the figures among these names, the one that says most first.

    >>> by_importance(["train_loss", "test_loss", "test_mine", "test_accuracy", "epsilon"])
    ['test_accuracy', 'test_mine', 'test_loss', 'train_loss']
    >>> by_importance(["test_loss_averaged", "test_accuracy_averaged", "test_loss", "test_accuracy"])
    ['test_accuracy', 'test_loss', 'test_accuracy_averaged', 'test_loss_averaged']
    """
    there = list(dict.fromkeys(names))
    averaged = [name.removesuffix(AVERAGED) for name in there if name.endswith(AVERAGED)]
    last = [f"{name}{AVERAGED}" for name in by_importance(averaged)] if averaged else []
    own = [name for name in there if name.startswith(TEST) and name not in KNOWN and name not in last]
    return [name for name in dict.fromkeys((*BEFORE_LOSS, *own, *KNOWN, *last)) if name in there]


def over_clients(names: Collection[str], begin: str = CLIENT) -> str | None:
    """Returns the figure among these names that was measured for each client; None if none was.

    Args:
        names: names of figures.
        begin: what its name begins with, CLIENT for one of the model or OWN for one of each client's own.

    >>> over_clients(["train_loss", "client_accuracy", "client_accuracy_worst", "client_accuracy_best"])
    'client_accuracy'
    """
    found = (name for name in names if name.startswith(begin))
    return next((name for name in found if all(f"{name}{end}" in names for end in TENTHS)), None)
