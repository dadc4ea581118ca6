"""Neural problem: any torch module and loss, a tile of clients at once where that is faster."""

import copy
import itertools
import math
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, Dataset

from fednormec.core.bounds import STRIP, Bound
from fednormec.core.fingerprint import fingerprint
from fednormec.core.problem import ByClient, Metrics, tile_size
from fednormec.core.records import NUMBERS, sum_of_rows
from fednormec.core.stages import stage
from fednormec.core.vectors import Layout, flatten, layout_of, neighbours, some_of
from fednormec.errors import UserError, at_least_one, one_of
from fednormec.problems import apart
from fednormec.problems.grouping import grouped, own_padding
from fednormec.problems.layers import Layered, for_convolutions
from fednormec.problems.losses import OURS, Loss, loss_named, require_fitting
from fednormec.problems.metrics import ADDITIVE, LOWER, Metric, checked_owners, means_of, measured, metrics_of
from fednormec.problems.record_sums import add_bounded, takes

ACTIVATIONS_TOGETHER = 2**24  # what layers put out for a tile, with convolutions: larger tiles gain no more
EXAMPLES_TOGETHER = 128  # but as many as these: smaller tiles cost more in calls than they save in memory
MOST_PADDING = 0.25  # of a tile, with convolutions: beyond it, one client after another is faster
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
HOSTILE = (math.nan, math.inf, -math.inf, 1e30, -1e30, 1e4, -1e4, 6.0, -6.0, 1e-30, 0.0)  # what others may send


class NeuralProblem:
    """Neural problem: f_i(x) is the mean loss of the module with parameters x on client i's examples.

    Args:
        module: any torch.nn.Module; its trainable parameters become the flat vector, its own weights the starting
            point. It must be a function of its parameters alone: no dropout, no statistics that move while training,
            nothing remembered from one call to the next.
        clients: one (inputs, targets) pair per client, arrays or tensors; sizes may differ.
        test: an (inputs, targets) pair to evaluate on, or None.
        loss: a name ("cross_entropy", "binary_cross_entropy", "mse" or "huber"), or a function (outputs, targets) ->
            the loss of each example (n,), or their mean (then clients of unequal size, and padded mini-batches, are
            computed one by one).
        metrics: what is measured on the test pair besides the loss: names ("accuracy", "auc", "mae", "rmse", "top5"),
            and functions of all outputs and targets that return one number, or one for each example, whose mean is
            taken. By default those that fit the loss.
        vectorize: "layers" computes a tile of clients in one pass over all their examples (modules whose parameters all
            belong to linear, 2-d convolution, group or 2-d batch normalisation layers, and which are known to keep
            examples apart: `problems.apart`), "vmap" in one vectorised call, "loop" one client after another. "auto" is
            the first of these that fits: layers, if the module can be taken apart and, with convolutions, several
            clients fit into a tile; loop, with convolutions or batch normalisation, or where vmap fails; else vmap.
            Where examples may touch each other, clients of unequal size are computed one by one.
            Bounded gradients of records are added in layers, unless another way was named.
        dtype: torch.float32 or torch.float64, of the parameters and of all data that are no whole numbers.
        device: where the data are stored and gradients are computed.
        tile: number of clients at once; by default as many as `tile_size` says, with convolutions at most 128 examples,
            or as many as let the layers put out 2^24 numbers if that is more.
        held_out: whether the test pair is clients' own data, so that figures on it are not private; else it is public.
        statistics: by what batch normalisation normalises in an evaluation: the statistics of the "batch" at hand, or
            those of the clients' "training" examples at the model in question. With the latter all figures look at
            clients' data, those on the test pair too: they are not private. Gradients always take the batch's.
        loss_examples: number of examples of each client, the first it has, that an evaluation looks at; by default all.
        per_client: whether an evaluation also says how the first metric (or the loss) is spread over the clients, on
            each one's own examples: that is not private, and takes about as long again.
        owners: number of the client that each example of the test pair was held out of, for `per_client` to look at
            these instead; None: they are nobody's.
        batch_size: number of examples that a gradient of the training will take of a client, by which `vectorize` and
            `tile` are chosen; None: all that it has.
        persons: whose each example of each client is, ids of any kind, where all examples of a person are one record;
            None: each example is one.
    """

    def __init__(
        self,
        module: nn.Module,
        clients: Sequence[Iterable[Any]],
        test: Iterable[Any] | None = None,
        loss: str | Loss = "cross_entropy",
        *,
        metrics: Sequence[str | Metric] | None = None,
        vectorize: Literal["auto", "layers", "vmap", "loop"] = "auto",
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        tile: int | None = None,
        held_out: bool = False,
        statistics: Literal["batch", "training"] = "batch",
        loss_examples: int | None = None,
        per_client: bool = False,
        owners: Sequence[int] | np.ndarray | None = None,
        batch_size: int | None = None,
        persons: Sequence[np.ndarray] | None = None,
    ) -> None:
        one_of("vectorize", vectorize, ("auto", "layers", "vmap", "loop"))
        one_of("statistics", statistics, ("batch", "training"))
        if dtype not in (torch.float32, torch.float64):
            raise UserError(
                f"a problem computes in float32 or float64, not in {dtype}: shorter numbers break the bound."
            )
        _require_function_of_parameters(module)
        self._module = copy.deepcopy(module).to(device=device, dtype=dtype).train()
        self._layout: Layout = layout_of(self._module)
        if not self._layout.dim:
            raise UserError("the model has no trainable parameter.")
        loss = loss_named(loss) if isinstance(loss, str) else loss
        self._loss, self._dtype, self._device = loss, dtype, torch.device(device)
        pairs = [self._pair(pair, f"client {i}", copy=False) for i, pair in enumerate(clients)]
        if not pairs:
            raise UserError("there are no clients: give at least one (inputs, targets) pair.")
        self._sizes = np.array([len(y) for _, y in pairs], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)[:-1]])
        self._records = grouped(persons, self._sizes)
        self._x, self._y = _concatenate([x for x, _ in pairs]), _concatenate([y for _, y in pairs])
        self._test, self._held_out = None if test is None else self._pair(test, "the test set"), held_out
        self._mixes = mixes = bool(_batch_norms(module))
        if statistics == "training" and not mixes:
            raise UserError("statistics = 'training' is for models with batch normalisation, and this one has none.")
        self._statistics, self._looked_at = statistics, self._sizes
        if loss_examples is not None:
            self._looked_at = np.minimum(self._sizes, at_least_one("loss_examples", loss_examples))
        self._per_client = per_client
        self._owners = checked_owners(owners, 0 if self._test is None else len(self._test[1]), len(pairs))
        self._convolves = any(isinstance(layer, CONVOLUTIONS) for layer in module.modules())
        if self._convolves:
            self._x = for_convolutions(self._x)  # laid out once, and not in every round
        self._own = threading.local()  # each thread binds parameters to a module of its own
        self._last_class, self._loss_of_each, self._classifies = self._try_one()
        self._metrics = metrics_of(loss, metrics, self._classifies)
        self._try_metrics()
        self._known = loss in OURS and apart.known(module)
        self._traces: dict[int, apart.Trace | None] = {}
        if not self._known:
            self._require_no_memory()
        self._keeps_apart = self._known or self._alike({2, 4})
        # padding would enter the statistics, the mean, or what else the examples of a batch share
        self._needs_whole_batches = mixes or not self._loss_of_each or not self._keeps_apart
        self._together = self._examples_together() if self._convolves else 1024
        taken = self._sizes if batch_size is None else np.minimum(self._sizes, at_least_one("batch_size", batch_size))
        most = max(1, self._together * len(pairs) // int(taken.sum())) if self._convolves else 128
        self._split_large = self._convolves and vectorize == "auto"
        together = tile_size(len(pairs), self.dim, most)
        self._written: int | None = None  # numbers of a record's gradient that layers write out; None: no layers
        self._way = self._chosen(
            vectorize, worthwhile=together > 1 or not self._convolves, looped=self._convolves or mixes
        )
        if self._way == "vmap":
            _let_vmap_fall_back()
        self._tile = at_least_one("tile", tile if tile is not None else 1 if self._way == "loop" else together)

    @property
    def dim(self) -> int:
        return self._layout.dim

    @property
    def num_clients(self) -> int:
        return len(self._sizes)

    @property
    def tile(self) -> int:
        return self._tile

    @property
    def client_sizes(self) -> np.ndarray:
        return self._sizes

    @property
    def way(self) -> str:
        """Way in which gradients are computed: "layers", "vmap" or "loop"."""
        return self._way

    def init(self, rng: np.random.Generator) -> Tensor:
        """Returns the module's own weights; build it with the seed you want."""
        return flatten(self._module)

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return dict(self.model(x).state_dict())

    def model(self, x: Tensor) -> nn.Module:
        """Returns a new module with the parameters x."""
        return self._bind(copy.deepcopy(self._module), x.detach().clone())

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        sizes = self._sizes[ids]
        if examples is None and (sizes == sizes[0]).all():
            index, mask = None, None
        else:
            examples = _all_examples(sizes) if examples is None else examples
            mask = examples >= 0
            index = self._starts[ids][:, None] + own_padding(examples, mask)
        padded = mask is not None and not mask.all()
        waste = 0.0 if mask is None else 1 - mask.mean()
        wasteful = padded and (self._needs_whole_batches or (self._convolves and waste > MOST_PADDING))
        own, width = (sizes, int(sizes[0])) if mask is None else (mask.sum(axis=1), mask.shape[1])
        large = self._split_large and width > self._together  # a tile would take so much memory for each client
        if self._way == "loop" or wasteful or large or not self._may_share(own, width, padded):
            return self._grad_one_by_one(x, ids, index, mask)
        with stage("data"):
            inputs, targets = self._batch(ids, index)
        weights = None if mask is None or not padded else self._tensor(mask / mask.sum(axis=1, keepdims=True))
        return (self._grad_in_layers if self._way == "layers" else self._grad_at_once)(x, inputs, targets, weights)

    def part(self, first: int, last: int) -> "NeuralProblem":
        some, sizes = copy.copy(self), self._sizes[first:last].copy()
        begin = int(self._starts[first])
        end = begin + int(sizes.sum())
        some._x, some._y = some_of(self._x, begin, end), some_of(self._y, begin, end)
        some._sizes, some._starts, some._test = sizes, np.concatenate([[0], np.cumsum(sizes)[:-1]]), None
        some._records = self._records.part(first, last)
        return some

    # records

    @property
    def grouped(self) -> bool:
        """True if any record is more than one example."""
        return self._records.order is not None

    @property
    def record_sizes(self) -> np.ndarray:
        """Number of records of each client, (M,)."""
        return self._records.sizes

    def examples_of(self, client: int, records: np.ndarray) -> np.ndarray:
        """Returns the examples of some of a client's records, (n, b), padded with -1.

        Args:
            client: number of the client.
            records: numbers of its records.
        """
        return self._records.examples_of(client, records)

    def require_records(self) -> None:
        """Raises UserError if examples enter one another's gradients, so that no record has one of its own."""
        norms = [name for name, layer in self._module.named_modules() if isinstance(layer, BatchNorm)]
        if norms:
            raise UserError(f"the layer '{norms[0]}' normalises a batch by all records in it, so that no record's "
                            "gradient can be bounded by itself: use GroupNorm in its place.")  # fmt: skip
        if not self._loss_of_each:
            raise UserError("the loss is a mean over the batch, of which no record's part can be bounded: return the "
                            "loss of each example, such as with reduction='none'.")  # fmt: skip

    def record_sum(self, x: Tensor, client: int, records: np.ndarray, bound: Bound) -> Tensor:
        """Returns the sum (d,), float64, of the bounded gradients of a client's records, layer by layer where it can.

        Args:
            x: a vector (d,).
            client: number of the client.
            records: numbers of its records.
            bound: bound on each record's gradient.
        """
        together = self._records_together
        parts = np.split(records, range(together, len(records), together))
        if not self._sums_in_layers({len(part) for part in parts}, bound):
            return sum_of_rows(self, x, client, records, bound)
        total = torch.zeros(self.dim, dtype=torch.float64, device=x.device)
        for part in parts:
            inputs, targets = self._examples(int(self._starts[client]) + part)
            left_out = add_bounded(total, self._layered().of_records(x, inputs, targets), bound, self._layout)
            for record in part[left_out]:  # one by one, so that none has a say in how another is computed
                total += sum_of_rows(self, x, client, np.array([record]), bound)
        return total

    def apart_from_data(self, x: Tensor) -> None:
        """Returns None: data enter all of a gradient."""
        return None

    def digest(self) -> str:
        """Returns a digest of the data and the loss, by which a run that is resumed knows the problem again."""
        module = copy.deepcopy(self._module)
        for parameter in module.parameters():
            if parameter.requires_grad:  # where these start is a question of its own: init
                parameter.data = parameter.data.new_empty(0)
        model = self._layout, self._metrics, self._statistics, self._held_out, self._looked_at
        looks = (*model, self._per_client, self._owners, *((self._records,) if self.grouped else ()))
        return fingerprint(self._x, self._y, self._sizes, self._test, module, self._loss, looks)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_own"}  # threads stay where they are

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _own=threading.local())
        if self._way == "vmap":
            _let_vmap_fall_back()

    def evaluate(self, x: Tensor) -> Metrics:
        """Computes figures of the model x.

        train_loss is the mean over clients, each weighing the same; the rest is on the test set.
        """
        with torch.no_grad():
            by_training = self._statistics == "training"
            module = self._with_statistics(x) if by_training else self._bound(x).eval()
            client_losses = self._client_losses(module, together=by_training or not self._needs_whole_batches)
            finite = client_losses[client_losses.isfinite()]
            tested = {} if self._test is None else self._test_metrics(module, *self._test)
            spread = self._by_client(module, by_training or not self._needs_whole_batches) if self._per_client else None
        own = {"train_loss": float(finite.mean())}
        apart = own | tested if self._held_out or by_training else own
        public = {} if self._held_out or by_training else tested
        return Metrics(public, apart if spread is None else apart | spread.figures, spread)

    def evaluate_own(self, models: Tensor) -> ByClient:
        """Computes the first metric, or else the loss, of each client's own model on that client's examples.

        They are those that were held out of it, if `owners` says which, and else the first `loss_examples`. Where a
        model normalises by training examples, it is by those of its client.

        Args:
            models: a model for each client, (M, d).
        """
        name, metric = next(iter(self._metrics.items()), ("loss", self._loss))
        by_training, values = self._statistics == "training", list[float]()
        together = by_training or not self._needs_whole_batches
        with torch.no_grad():
            for client, x, y in self._own_examples():
                if by_training:
                    module = self._with_statistics(models[client], self._pieces(*self._seen_of(client)))
                else:
                    module = self._bound(models[client]).eval()
                parts = self._pieces(x, y) if together else [(x, y)]
                outputs = [module(for_convolutions(part)) for part, _ in parts]
                values.append(measured(name, metric, outputs[0] if len(outputs) == 1 else torch.cat(outputs), y))
        return ByClient.of(name, name not in LOWER, values, self._owners is not None)

    # gradients

    def _may_share(self, own: np.ndarray, width: int, padded: bool) -> bool:
        """Returns whether these clients may share a batch: module and loss treat it as they treat each client's own."""
        if self._known or (self._way == "vmap" and not padded):
            return True
        return self._alike({width * (len(own) if self._way == "layers" else 1), *own.tolist()})

    def _alike(self, sizes: set[int]) -> bool:
        """Returns whether batches of these sizes are treated alike, each example by itself."""
        for n in [n for n in sizes if n not in self._traces]:
            inputs, targets = self._probe(n)
            self._traces[n] = apart.trace(self._thread_module().train(), self._loss, for_convolutions(inputs), targets)
        traces = {self._traces[n] for n in sizes}
        return len(traces) == 1 and None not in traces

    @property
    def _records_together(self) -> int:
        """Number of records in one pass: by the model alone, since no record may have a say in it."""
        most = max(1, min(self._together, NUMBERS // max(1, self._written or 0)))
        return most // STRIP * STRIP or most

    def _sums_in_layers(self, sizes: set[int], bound: Bound) -> bool:
        """Returns whether bounded gradients of records, in batches of these sizes, are added layer by layer."""
        if self._written is None or self.grouped or not takes(bound):
            return False
        return self._known or self._alike({1, *sizes})

    def _layered(self) -> Layered:
        """Returns this thread's module, taken apart into layers."""
        if not hasattr(self._own, "layered"):
            self._own.layered = Layered(self._module, self._layout, self._loss)
        layered: Layered = self._own.layered
        return layered

    def _grad_in_layers(self, x: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        return self._layered().grad(x, inputs, targets, weights)

    def _grad_at_once(self, x: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        module, loss = self._thread_module(), self._loss

        def objective(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
            losses = loss(functional_call(module, parameters, (inputs,)), targets)
            return losses.mean() if weights is None else (losses * weights).sum()

        in_dims = (None if x.ndim == 1 else 0, 0, 0, None if weights is None else 0)
        gradients = vmap(grad(objective), in_dims)(self._layout.views(x), inputs, targets, weights)
        return torch.cat([gradients[name].flatten(1) for name in self._layout.names], dim=1)

    def _grad_one_by_one(self, x: Tensor, ids: np.ndarray, index: np.ndarray | None, mask: np.ndarray | None) -> Tensor:
        rows = torch.empty(len(ids), self.dim, dtype=x.dtype, device=x.device)
        shared = self._bound(x) if x.ndim == 1 else None
        for r, i in enumerate(ids):
            if index is None:
                where: slice | Tensor = slice(self._starts[i], self._starts[i] + self._sizes[i])
            else:
                where = torch.as_tensor(index[r] if mask is None else index[r][mask[r]], device=self._device)
            inputs, targets = _taken(self._x, where), _taken(self._y, where)
            self._grad_of(self._bound(x[r]) if shared is None else shared, inputs, targets, out=rows[r])
        return rows

    def _grad_of(self, module: nn.Module, inputs: Tensor, targets: Tensor, out: Tensor) -> Tensor:
        loss = self._loss(module(for_convolutions(inputs)), targets).mean()
        parameters = [p for p in module.parameters() if p.requires_grad]
        pieces = torch.autograd.grad(loss, parameters, materialize_grads=True)
        return torch.cat([g.flatten() for g in pieces], out=out)

    def _examples(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of examples, by their numbers among those of all clients."""
        where = neighbours(numbers)
        found = torch.as_tensor(numbers, device=self._device) if where is None else where
        return _taken(self._x, found), _taken(self._y, found)

    def _batch(self, ids: np.ndarray, index: np.ndarray | None) -> tuple[Tensor, Tensor]:
        if index is not None:
            where: slice | Tensor = torch.as_tensor(index.ravel(), device=self._device)
            shape = index.shape
        elif neighbours(ids) is not None:  # of equal size: views of the data as they lie
            shape = (len(ids), int(self._sizes[ids[0]]))
            where = slice(int(self._starts[ids[0]]), int(self._starts[ids[0]]) + shape[0] * shape[1])
        else:
            return self._batch(ids, self._starts[ids][:, None] + np.arange(self._sizes[ids[0]]))
        inputs, targets = _taken(self._x, where), _taken(self._y, where)
        return torch.unflatten(inputs, 0, shape), torch.unflatten(targets, 0, shape)

    def _bound(self, x: Tensor) -> nn.Module:
        """Returns this thread's module, in training mode, with parameters that are views of x."""
        module = self._bind(self._thread_module(), x.detach())
        return module if module.training else module.train()

    def _bind(self, module: nn.Module, x: Tensor) -> nn.Module:
        views = self._layout.views(x)
        for name, parameter in module.named_parameters():
            if name in views:
                parameter.data = views[name]
        return module

    def _thread_module(self) -> nn.Module:
        if not hasattr(self._own, "module"):
            self._own.module = copy.deepcopy(self._module)
        module: nn.Module = self._own.module
        return module

    # evaluation

    def _client_losses(self, module: nn.Module, together: bool) -> Tensor:
        """Returns each client's mean loss; `together` if examples of several may share a batch."""
        sizes = self._looked_at
        parts = [slice(a, a + n) for a, n in zip(self._starts, sizes, strict=True)]
        if not together:
            losses = [self._loss(module(for_convolutions(self._x[p])), self._y[p]).mean() for p in parts]
            return torch.stack(losses)
        x, y = self._evaluated()
        pieces = [self._loss(module(for_convolutions(x)), y) for x, y in self._pieces(x, y)]
        owner = torch.as_tensor(np.repeat(np.arange(self.num_clients), sizes), device=self._device)
        sums = torch.zeros(self.num_clients, dtype=self._dtype, device=self._device)
        return sums.index_add_(0, owner, torch.cat(pieces)) / self._tensor(sizes)

    def _by_client(self, module: nn.Module, together: bool) -> ByClient:
        """Returns the first metric, or else the loss, of each client; `together` as for their losses."""
        name, metric = next(iter(self._metrics.items()), ("loss", self._loss))
        (x, y), owners = self._evaluated(), np.repeat(np.arange(self.num_clients), self._looked_at)
        if self._test is not None and self._owners is not None:
            (x, y), owners = self._test, self._owners
        if together and (metric in ADDITIVE or (name == "loss" and self._loss_of_each)):
            each = [metric(module(for_convolutions(x)), y) for x, y in self._pieces(x, y)]
            values = means_of(owners, torch.cat(each).cpu().double().numpy())
        else:
            own = np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners))[:-1])
            where = [torch.as_tensor(part, device=self._device) for part in own if len(part) > self._mixes]
            values = [measured(name, metric, module(for_convolutions(_taken(x, w))), y[w]) for w in where]
        return ByClient.of(name, name not in LOWER, values, owners is self._owners)

    def _own_examples(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields the number and the examples of each client of which enough are there to be looked at."""
        held_out: list[np.ndarray] | None = None
        if self._test is not None and self._owners is not None:
            counts = np.bincount(self._owners, minlength=self.num_clients)
            held_out = np.split(np.argsort(self._owners, kind="stable"), np.cumsum(counts)[:-1])
        for client in range(self.num_clients):
            x, y = self._seen_of(client)
            if self._test is not None and held_out is not None:
                where = torch.as_tensor(held_out[client], device=self._device)
                x, y = _taken(self._test[0], where), self._test[1][where]
            batch = len(y) if self._statistics == "batch" else int(self._looked_at[client])
            if len(y) and batch > self._mixes:  # one example has no variance
                yield client, x, y

    def _seen_of(self, client: int) -> tuple[Tensor, Tensor]:
        """Returns a client's examples that an evaluation looks at."""
        own = slice(int(self._starts[client]), int(self._starts[client] + self._looked_at[client]))
        return self._x[own], self._y[own]

    def _evaluated(self) -> tuple[Tensor, Tensor]:
        """Returns the clients' examples that an evaluation looks at."""
        if self._looked_at is self._sizes:
            return self._x, self._y
        own = [np.arange(a, a + n) for a, n in zip(self._starts, self._looked_at, strict=True)]
        where = torch.as_tensor(np.concatenate(own), device=self._device)
        return _taken(self._x, where), _taken(self._y, where)

    def _with_statistics(self, x: Tensor, among: list[tuple[Tensor, Tensor]] | None = None) -> nn.Module:
        """Returns a new module with the parameters x that normalises by the clients' examples, or by those `among`.

        Mean and variance are averages over batches, as a trainer's running averages are, but all at this x.
        """
        module = self.model(x).train()
        for layer in _batch_norms(module):
            layer.track_running_stats, layer.momentum = True, None  # all batches weigh the same
            layer.running_mean, layer.running_var = (x.new_zeros(layer.num_features) for _ in range(2))
            layer.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=self._device)
        for inputs, _ in self._pieces(*self._evaluated()) if among is None else among:
            if len(inputs) > 1:  # one example has no variance
                module(for_convolutions(inputs))
        return module.eval()

    def _test_metrics(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, float]:
        loss, kept, sums = 0.0, list[Any](), dict.fromkeys(self._metrics, 0.0)
        of_all = {name: metric for name, metric in self._metrics.items() if metric not in ADDITIVE}
        for x, y in self._pieces(inputs, targets):
            outputs = module(for_convolutions(x))
            loss += float(self._loss(outputs, y).mean()) * len(y)
            for name in (name for name in self._metrics if name not in of_all):
                sums[name] += float(self._metrics[name](outputs, y).sum())
            if of_all:
                kept.append(outputs)
        figures = {name: total / len(targets) for name, total in sums.items()}
        whole = torch.cat(kept) if of_all else None
        figures |= {name: measured(name, metric, whole, targets) for name, metric in of_all.items()}
        return {"test_loss": loss / len(targets)} | {f"test_{name}": value for name, value in figures.items()}

    def _pieces(self, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(torch.split(x, self._together), torch.split(y, self._together), strict=True))

    # construction

    def _chosen(self, vectorize: str, worthwhile: bool, looped: bool) -> str:
        if vectorize in ("auto", "layers"):
            self._written = self._separable() if self._keeps_apart else None
            separable = self._written is not None
            if vectorize == "layers" and not separable:
                raise UserError(
                    "this model cannot be computed layer by layer: a parameter belongs to a layer of another kind than "
                    "linear, 2-d convolution, group or 2-d batch normalisation, a layer is used twice or written over, "
                    "or examples mix, or may mix, in the model or in the loss; take vectorize = 'auto'."
                )
            if vectorize == "layers" or (separable and worthwhile):
                return "layers"
        if vectorize == "loop" or (vectorize == "auto" and looped):
            return "loop"
        trouble = self._trouble_with_vmap()
        if trouble is not None and vectorize == "vmap":
            raise UserError(f"this model cannot be vectorised over clients: {trouble}; take vectorize = 'auto'.")
        return "vmap" if trouble is None else "loop"

    def _pair(self, pair: Iterable[Any], whose: str, copy: bool = True) -> tuple[Tensor, Tensor]:
        if isinstance(pair, Dataset | DataLoader):
            raise UserError(
                f"{whose} is a {type(pair).__name__}, and expected are all its inputs and targets: call data = "
                "fn.data.from_datasets(datasets, test), and give data.clients and data.test."
            )
        x, y = (self._tensor(values, copy) for values in pair)
        if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
            raise UserError(f"{whose} has inputs of shape {tuple(x.shape)} but targets of shape {tuple(y.shape)}.")
        if not len(x):
            raise UserError(f"{whose} has no data: leave it out, or give it at least one example.")
        return x, y

    def _tensor(self, values: Any, copy: bool = True) -> Tensor:
        """Returns a tensor: floats in our dtype, whole numbers as int64.

        A copy is in torch's own memory (aligned: the same bits every time); what is concatenated afterwards needs none.
        """
        if isinstance(values, np.ndarray) and values.dtype.kind in "OU":
            raise UserError("a model takes numbers, and these are texts or other objects: make numbers of them first, "
                            "such as by [features] in a config.")  # fmt: skip
        tensor = torch.as_tensor(values)
        dtype = self._dtype if tensor.is_floating_point() else torch.int64
        return tensor.to(device=self._device, dtype=dtype, copy=copy)

    def _separable(self) -> int | None:
        """Returns how many numbers of a record's gradient are written out if the module can be taken apart into layers.

        It can if the gradients of two clients at once are those of each; None: it cannot. Tried in float64, where
        rounding puts no value on the other side of a kink, unless the module knows no float64.
        """
        if not (self._loss_of_each and self._x.is_floating_point()):
            return None
        found = self._separable_in(torch.float64)
        return self._separable_in(self._dtype) if found is None else found

    def _separable_in(self, dtype: torch.dtype) -> int | None:
        module = copy.deepcopy(self._module).to(dtype=dtype)
        layered = Layered(module, self._layout, self._loss)
        if not layered.complete:
            return None
        inputs, targets = (torch.unflatten(t, 0, (2, 2)) for t in self._probe(4, dtype))
        inputs[1] = 3 * inputs[1] + 1  # unlike the other client's, so that statistics of both are those of neither

        def own(x: Tensor, i: int) -> Tensor:
            parameters = {name: view.clone().requires_grad_() for name, view in self._layout.views(x).items()}
            outputs = functional_call(module, parameters, (for_convolutions(inputs[i]),))
            loss = self._loss(outputs, targets[i]).mean()
            pieces = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
            return torch.cat([g.flatten() for g in pieces])

        x = flatten(module)
        for at in (x, torch.stack([x, 0.9 * x])):
            try:
                expected = torch.stack([own(at if at.ndim == 1 else at[i], i) for i in range(2)])
            except (RuntimeError, TypeError, ValueError):  # other numbers than its own
                return None
            if not layered.agrees(at, inputs, targets, expected):
                return None
        if not (self._known or self._holds_out(layered, x, inputs[0], targets)):
            return None
        return layered.of_records(x, inputs[0], targets[0]).layout.dim

    def _holds_out(self, layered: Layered, x: Tensor, inputs: Tensor, targets: Tensor) -> bool:
        """Returns whether a client's gradient stays what it is between two clients who send what they like."""
        targets, tolerance = targets[[1, 0, 1]], 1e-9 if x.dtype == torch.float64 else 1e-4
        weights = torch.tensor([[0.75, 0.25]] * 3, dtype=x.dtype, device=self._device)
        ways = ((x, None), (torch.stack([x, 0.9 * x, x]), weights))
        for size, (at, weighted) in itertools.product((0.01, 1.0, 100.0), ways):
            all_inputs = torch.stack([size * inputs] * 3)
            try:
                alone = layered.grad(at, all_inputs, targets, weighted)[1]
                for value in HOSTILE:
                    all_inputs[0], all_inputs[2, 1] = value, value  # all that one client has, half of the other's
                    error = (layered.grad(at, all_inputs, targets, weighted)[1] - alone).norm()
                    if not error <= tolerance * alone.norm():
                        return False
            except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError, UserError):
                return False
        return True

    def _trouble_with_vmap(self) -> str | None:
        """Returns what is wrong with all clients in one vectorised call; None: nothing is.

        The call fails where a number decides what is done.
        """
        inputs, targets = (torch.unflatten(t, 0, (2, 2)) for t in self._probe(4))
        x = flatten(self._module)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it may say that it is slow
                for at in (x, torch.stack([x, x])):
                    self._grad_at_once(at, inputs, targets, None)
        except Exception as error:  # whatever a stranger's code raises
            return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        return None

    def _probe(self, examples: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Makes up examples in the shape of the clients': no number of theirs has a say in how gradients are computed.

        Half of them are of the first class, half of the last.
        """

        def like(data: Tensor, last: int) -> Tensor:
            shape = (examples, *data.shape[1:])
            if data.is_floating_point():
                return (
                    torch.arange(math.prod(shape), dtype=dtype or self._dtype, device=self._device).sin_().view(shape)
                )
            later = torch.arange(examples, device=self._device) >= examples // 2
            return (last * later).view(-1, *[1] * (data.ndim - 1)).repeat(1, *data.shape[1:])

        return like(self._x, 0), like(self._y, self._last_class).abs()

    def _require_no_memory(self) -> None:
        """Raises UserError if something that a client sent stays behind in the module, wherever it hides."""
        module = copy.deepcopy(self._module)
        inputs, targets = self._probe(2)

        def state(of: nn.Module) -> dict[str, Tensor]:
            return dict(itertools.chain(of.named_buffers(), of.named_parameters()))

        before, kept = None, state(self._module)
        for value in (1.0, *HOSTILE):
            with torch.no_grad():
                with suppress(Exception):  # of what it does not take
                    module(inputs + value if inputs.is_floating_point() else inputs)
                losses = self._loss(module(inputs), targets)
            moved = [name for name, tensor in state(module).items() if not _same(tensor, kept[name])]
            if moved or (before is not None and not _same(losses, before)):
                what = f"changes '{moved[0]}'" if moved else "remembers earlier calls"
                raise UserError(f"the model {what}: what one client has would enter another's message; remove that.")
            before = losses

    def _examples_together(self) -> int:
        outputs: list[int] = []

        def count(layer: nn.Module, given: Any, out: Any) -> None:
            outputs.append(out.numel() if isinstance(out, Tensor) else 0)

        leaves = [layer for layer in self._module.modules() if not next(layer.children(), None)]
        hooks = [layer.register_forward_hook(count) for layer in leaves]
        with torch.no_grad():
            self._module(self._probe(2)[0])
        for hook in hooks:
            hook.remove()
        return max(EXAMPLES_TOGETHER, 2 * ACTIVATIONS_TOGETHER // max(1, sum(outputs)))

    def _try_one(self) -> tuple[int, bool, bool]:
        """Runs two examples through module and loss; raises UserError if something does not fit.

        Returns:
            The last class, as far as the outputs tell; whether the loss is per example; whether outputs are scores of
            classes.
        """
        self._last_class = 0
        x, y = self._probe(2)
        drawn, kept = torch.get_rng_state(), {n: b.clone() for n, b in self._module.named_buffers()}
        try:
            with torch.no_grad():
                outputs = self._module(x)
        except UserError:
            raise
        except Exception as error:  # whatever a stranger's code raises
            raise UserError(
                f"the model does not take examples of shape {tuple(self._x.shape[1:])}: {_reason(error)}."
            ) from error
        if not torch.equal(drawn, torch.get_rng_state()):
            torch.set_rng_state(drawn)
            raise UserError("the model draws from torch's global generator, which no seed of a run controls: "
                            "remove what is random in it.")  # fmt: skip
        moved = [name for name, b in self._module.named_buffers() if not torch.equal(b, kept[name])]
        if moved:
            raise UserError(f"the model changes its buffer '{moved[0]}' while training, which is no parameter and "
                            "would leave the clients outside the messages: remove it.")  # fmt: skip
        targets = [self._y] if self._test is None else [self._y, self._test[1]]
        require_fitting(self._loss, outputs, targets)
        try:
            losses: Tensor = self._loss(outputs, y)
        except UserError:
            raise
        except Exception as error:  # whatever a stranger's code raises
            raise UserError(
                f"the loss does not take targets of shape {tuple(y.shape[1:])}: {_reason(error)}."
            ) from error
        if not isinstance(losses, Tensor):
            raise UserError(f"the loss must return a tensor, one number per example, not {type(losses).__name__}.")
        if losses.shape not in ((), (2,)):
            raise UserError(
                f"the loss must be one number per example or their mean, not of shape {tuple(losses.shape)}."
            )
        classifies = _classifies(outputs, y)
        return (outputs.shape[-1] - 1 if classifies else 0), losses.shape == (2,), classifies

    def _try_metrics(self) -> None:
        """Raises UserError if a metric does not fit the outputs, now and not after the first rounds."""
        if self._test is not None:
            x, y = self._probe(2)
            with torch.no_grad():
                outputs = self._module(x)
            for name, metric in self._metrics.items():
                measured(name, metric, outputs, y)


def _let_vmap_fall_back() -> None:
    """Keeps torch from saying that vmap has no rule for a function such as attention, and calls it client by client.

    With all around it in one call, that is still faster than one client after another, or as fast. For the whole
    process, since gradients are computed on threads, and the filters of warnings are not theirs.
    """
    warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented", UserWarning)


def _reason(error: Exception) -> str:
    said = next(iter(str(error).splitlines()), "")
    return said if said else type(error).__name__


def _concatenate(tensors: list[Tensor]) -> Tensor:
    odd = next((i for i, t in enumerate(tensors) if t.dtype != tensors[0].dtype), None)
    if odd is not None:
        raise UserError(f"client {odd} has numbers of type {tensors[odd].dtype}, client 0 of {tensors[0].dtype}.")
    odd = next((i for i, t in enumerate(tensors) if t.shape[1:] != tensors[0].shape[1:]), None)
    if odd is not None:
        shapes = tuple(tensors[odd].shape[1:]), tuple(tensors[0].shape[1:])
        raise UserError(f"client {odd} has examples of shape {shapes[0]}, client 0 of shape {shapes[1]}.")
    return torch.cat(tensors)


def _batch_norms(module: nn.Module) -> list[BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, BatchNorm)]


def _taken(data: Tensor, where: slice | Tensor) -> Tensor:
    """Returns some examples, laid out in memory as all of them are; neighbours are a view."""
    if isinstance(where, slice):
        return data[where]
    if data.ndim == 4 and data.is_contiguous(memory_format=torch.channels_last):
        return data.permute(0, 2, 3, 1).index_select(0, where).permute(0, 3, 1, 2)
    return data.index_select(0, where)  # faster than data[where]


def _all_examples(sizes: np.ndarray) -> np.ndarray:
    everyone = np.broadcast_to(np.arange(sizes.max()), (len(sizes), sizes.max()))
    return np.where(everyone < sizes[:, None], everyone, -1)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-6, atol=0, equal_nan=True)


def _classifies(outputs: Any, targets: Tensor) -> bool:
    """Returns whether the outputs are a score for each class, of one target or of several in a row."""
    whole = not targets.is_floating_point() and isinstance(outputs, Tensor)
    return whole and outputs.ndim == targets.ndim + 1 and outputs.shape[:-1] == targets.shape


def _require_function_of_parameters(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, DROPOUTS) and layer.p > 0:
            raise UserError(f"the layer '{name}' drops out at random from torch's global generator, which no seed of a "
                            "run controls: remove it or set its probability to 0.")  # fmt: skip
        if getattr(layer, "running_mean", None) is not None:
            raise UserError(f"the layer '{name}' keeps running statistics, which are no parameters and would leave the "
                            "clients outside the messages: use GroupNorm, or track_running_stats=False.")  # fmt: skip
        if getattr(layer, "max_norm", None) is not None:
            raise UserError(f"the layer '{name}' shortens parameters when an example meets them (max_norm), which "
                            "would leave the clients outside the messages: leave max_norm out.")  # fmt: skip
