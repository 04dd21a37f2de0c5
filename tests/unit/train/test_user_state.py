"""What a script hands over is saved whole, or refused."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from toolkit.base import fsio
from toolkit.base.errors import ConfigError
from toolkit.checkpoint import whole
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.reader import load
from toolkit.checkpoint.writer import save
from toolkit.strategies.optimizer_state import OptimizerState
from toolkit.train.feed import IterableFeed, seeder
from toolkit.train.handed_over import Unsaved
from toolkit.train.plain_state import decode, encode
from toolkit.train.run_checkpoints import USER_LOOP, log_what_differs
from toolkit.train.user_state import UserState


def handed_over(**objects: Any) -> UserState:
    cpu = torch.device("cpu")
    return UserState(objects, 0, 1, cpu)


@pytest.fixture(autouse=True)
def only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no process group: what is sent stays."""
    monkeypatch.setattr("toolkit.train.user_state.broadcast_tensors", lambda tensors, source: None)
    monkeypatch.setattr("toolkit.train.user_state.gather_rows", lambda row: row[None])


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    fsio.make_dir(tmp_path / "checkpoints")
    return CheckpointFolder(tmp_path / "checkpoints")


class Lookahead(Optimizer):
    """A wrapper with weights of its own, as several packages have it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})


class AcceleratedOptimizer(Lookahead):
    """A wrapper without a state, by the name of accelerate's."""


class WithSharedState(Lookahead):
    """A wrapper that keeps its state where the inner optimizer does, as timm's does."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.state = optimizer.state


class Counting(SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": 1}


def test_a_wrapper_with_a_state_of_its_own_is_refused() -> None:
    model = nn.Linear(2, 2)
    handed_over(model=model, optimizer=AcceleratedOptimizer(SGD(model.parameters())))
    handed_over(model=model, optimizer=WithSharedState(SGD(model.parameters())))
    wrapper = Lookahead(SGD(model.parameters()))
    with pytest.raises(ConfigError, match=r"run\.resumable: Lookahead wraps SGD, and only the state of one of them"):
        handed_over(model=model, optimizer=wrapper)
    with pytest.raises(ConfigError, match=r"optim\.name: Lookahead wraps SGD"):
        OptimizerState({}, wrapper)
    with pytest.raises(ConfigError, match=r"state_dict\(\) of Counting has calls beside the state"):
        handed_over(model=model, optimizer=Counting(model.parameters()))


class Exporting(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].clone()


def test_a_module_whose_state_has_copies_of_weights_is_refused() -> None:
    model = nn.Sequential(Exporting(2, 2))
    with pytest.raises(ConfigError, match=r"model: its state_dict\(\) has a copy of 0\.weight"):
        handed_over(model=model)
    model.requires_grad_(False)
    handed_over(model=model)


def test_layers_without_a_shape_yet_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(ConfigError, match=r"model: 0\.weight, 0\.bias, 1\.weight .* have no shape before the first"):
        handed_over(model=model)
    model(torch.ones(3, 4))
    handed_over(model=model)


def test_an_average_of_another_network_is_not_taken_for_the_models() -> None:
    """An export with --weights average gave the critic's average as the model's."""
    model, critic = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"ema is an average of critic.*run\.resumable\(ema_critic="):
        handed_over(model=model, critic=critic, ema=AveragedModel(critic))
    handed_over(model=model, critic=critic, ema_critic=AveragedModel(critic))
    handed_over(model=model, critic=critic, ema=AveragedModel(model))


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Tensor:
        return torch.ones(2)

    def set_extra_state(self, state: Tensor) -> None:
        pass


def test_extra_state_may_be_a_new_tensor_each_time() -> None:
    handed_over(model=nn.Sequential(WithExtraState(2, 2)))


def test_lists_of_tensors_in_an_optimizer_come_back(checkpoints: CheckpointFolder) -> None:
    def begun() -> tuple[nn.Linear, torch.optim.LBFGS, UserState]:
        torch.manual_seed(1)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        return model, optimizer, handed_over(model=model, optimizer=optimizer)

    def step(model: nn.Linear, optimizer: torch.optim.LBFGS) -> None:
        def loss() -> Tensor:
            optimizer.zero_grad()
            value = (model(torch.eye(2)) - torch.tensor([1.0, 2.0])).pow(4).sum()
            value.backward()
            return value

        optimizer.step(loss)

    model, optimizer, first = begun()
    for _ in range(3):
        step(model, optimizer)
    save(checkpoints, 3, first.state(), {}, rank=0, world_size=1, kv=None)
    again, again_optimizer, second = begun()
    second.on_loaded(load(checkpoints, second.places, rank=0, world_size=1, kv=None).values)
    for _ in range(2):
        step(model, optimizer)
        step(again, again_optimizer)
    assert len(again_optimizer.state[again.weight]["old_dirs"]) > 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


class Shampoo(SGD):
    """An optimizer that keeps a list of tensors."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["factors"] = [parameter.grad.clone()]


def test_a_list_of_tensors_is_refused_as_optim_name() -> None:
    model = nn.Linear(2, 1)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"optim\.name: Shampoo keeps a list as optim/weight/factors"):
        OptimizerState(names, Shampoo(model.parameters())).entries()


def saved_after(checkpoints: CheckpointFolder, first: bool, then: bool) -> None:
    """Save a layer that was trained at first, or not, and then."""
    model = nn.Linear(2, 2).requires_grad_(first)
    handed = handed_over(model=model)
    model.requires_grad_(then)
    save(checkpoints, 4, handed.state(), {}, rank=0, world_size=1, kv=None)


def loaded_into(checkpoints: CheckpointFolder, model: nn.Module) -> None:
    places = handed_over(model=model)
    places.on_loaded(load(checkpoints, places.places, rank=0, world_size=1, kv=None).values)


@pytest.mark.parametrize("then", [True, False])
def test_a_layer_is_frozen_as_at_the_save_unless_the_script_has_changed(
    checkpoints: CheckpointFolder, then: bool
) -> None:
    saved_after(checkpoints, not then, then)
    same, other = nn.Linear(2, 2).requires_grad_(not then), nn.Linear(2, 2).requires_grad_(not then)
    other.bias.requires_grad_(then)
    loaded_into(checkpoints, same)
    loaded_into(checkpoints, other)
    assert [p.requires_grad for p in (same.weight, same.bias, other.weight, other.bias)] == [then, then, not then, then]


def test_a_layer_that_ddp_was_made_without_is_refused(
    checkpoints: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.train.handed_over.DistributedDataParallel", nn.DataParallel)  # needs no process group
    saved_after(checkpoints, first=False, then=True)
    with pytest.raises(ConfigError, match=r"weight, bias are trained since a later step.*wrap it after run\.resumable"):
        loaded_into(checkpoints, nn.DataParallel(nn.Linear(2, 2).requires_grad_(False)))


class Observed(nn.Linear):
    """Has buffers of a size that it learns from the first samples, as torch's observers have."""

    lowest: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("lowest", torch.tensor([]))

    def forward(self, samples: Tensor) -> Tensor:
        self.lowest = samples.amin(0) if not self.lowest.numel() else torch.minimum(self.lowest, samples.amin(0))
        return super().forward(samples)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.lowest = torch.empty_like(state[f"{prefix}lowest"])
        super()._load_from_state_dict(state, prefix, *args)


class Fixed(nn.Linear):
    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("lowest", torch.zeros(size))


def test_a_module_that_sizes_its_buffers_as_it_runs_comes_back(checkpoints: CheckpointFolder) -> None:
    model = nn.Sequential(Observed(3, 2), Observed(2, 2))
    model(torch.randn(4, 3))
    save(checkpoints, 4, handed_over(model=model).state(), {}, rank=0, world_size=1, kv=None)
    fresh = nn.Sequential(Observed(3, 2), Observed(2, 2))
    loaded_into(checkpoints, fresh)
    assert [
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, fresh.state_dict()[name])
    ] == []


def test_a_buffer_of_another_size_is_refused_where_its_module_cannot_take_it(checkpoints: CheckpointFolder) -> None:
    save(checkpoints, 4, handed_over(model=Fixed(3, 2, 5)).state(), {}, rank=0, world_size=1, kv=None)
    with pytest.raises(ConfigError, match=r"(?s)the checkpoint is another model's.*size mismatch for lowest"):
        loaded_into(checkpoints, Fixed(3, 2, 4))


def test_an_average_has_the_names_of_the_model_that_it_averages(checkpoints: CheckpointFolder) -> None:
    model = nn.Linear(2, 2)
    wrapped = nn.DataParallel(model)
    state = handed_over(model=wrapped, ema=AveragedModel(wrapped)).state()
    assert {"model/weight", "ema/weight"} <= state.keys()
    assert whole.model_tensors(state)[0] == whole.AVERAGE
    # An average of one of several networks is not one of the model.
    parts = handed_over(first=model, second=nn.Linear(2, 2), ema=AveragedModel(model)).state()
    assert whole.model_tensors(parts)[0] == whole.RAW


def test_a_shuffling_generator_that_is_saved_goes_on_with_its_epoch(checkpoints: CheckpointFolder) -> None:
    def begun() -> tuple[UserState, DataLoader[Any], torch.Generator]:
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(TensorDataset(torch.arange(16)), 2, shuffle=True, generator=generator)
        return handed_over(model=nn.Linear(1, 1), generator=generator), loader, generator

    first, loader, _ = begun()
    seen = []
    for number, (batch,) in enumerate(IterableFeed(loader, seeder(3, 0), 1, is_there=False).epoch(0, 0, 0)):
        seen.append(batch.tolist())
        if number == 3:
            save(checkpoints, 4, first.state(), {}, rank=0, world_size=1, kv=None)
    second, loader, _ = begun()
    second.on_loaded(load(checkpoints, second.places, rank=0, world_size=1, kv=None).values)
    feed = IterableFeed(loader, seeder(3, 0), 1, is_there=False, origins=second.origins)
    assert [batch.tolist() for (batch,) in feed.epoch(0, 4, 4)] == seen[4:]


class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.drawn = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(2, generator=self.drawn)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_generator_that_a_layer_draws_from_goes_on(checkpoints: CheckpointFolder, ranks: int) -> None:
    """On another number of ranks it begins as the script makes it: each rank had its own."""
    first, again = Noisy(), Noisy()
    first(torch.ones(2))
    save(checkpoints, 3, handed_over(model=first).state(), {}, rank=0, world_size=1, kv=None, attempt=1)
    expected = torch.rand(4, generator=first.drawn if ranks == 1 else torch.Generator().manual_seed(7))
    cpu = torch.device("cpu")
    state = UserState({"model": again}, 0, ranks, cpu)
    state.on_loaded(load(checkpoints, state.places, rank=0, world_size=1, kv=None, attempt=2).values)
    assert torch.equal(torch.rand(4, generator=again.drawn), expected)


def test_a_resume_on_other_ranks_claims_the_same_results_of_run_loader_only(caplog: pytest.LogCaptureFixture) -> None:
    for identity, claim in (({}, "may repeat or leave out samples"), ({"global batch size": 8}, "to rounding only")):
        now, saved = (
            {"identity": {"kind": USER_LOOP, **identity}, "conditions": {"world size": size}} for size in (2, 3)
        )
        caplog.clear()
        log_what_differs(saved, now)  # type: ignore[arg-type]
        (message,) = caplog.messages
        assert claim in message


class Counted(nn.Module):
    """Counts its calls in several ways, of which checkpoints have one."""

    lost: Tensor
    table: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.handed = torch.zeros(()), torch.zeros(())
        self.cache, self.out = torch.zeros(0), torch.zeros(2, 3)
        self.sparse = torch.ones(2).to_sparse()
        self.register_buffer("lost", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        for each in (self.lost, self.handed, self.kept):
            each += 1
        self.cache, self.sparse = x.new_zeros(len(x)), self.sparse * 2
        self.out = x.requires_grad_() * self.table
        return self.out


def test_tensors_that_change_and_are_not_saved_are_named() -> None:
    inside = Counted()
    unsaved = Unsaved({"model/": nn.Sequential(inside, nn.BatchNorm1d(3)), "ema/": Counted()}, [inside.handed])
    assert unsaved.changed() == []
    inside(torch.ones(2, 3))
    assert sorted(unsaved.changed()) == ["model/0.lost", "model/0.seen"]


def test_values_of_other_state_are_told_by_their_places() -> None:
    optimizer = SGD(nn.Linear(2, 1).parameters(), lr=0.5)
    state = handed_over(
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 7),
        meter={"avg": 0.25, "seen": (1, "x"), "best": np.float32(0.5), "last": torch.tensor([2.0])},
        replay=[*range(101)],
        generator=torch.Generator(),
        loader=StatefulLoader(),
    )
    parts = state.value_digests()
    told = {name: text for name, text in parts.items() if not text.startswith("#")}
    assert told.items() >= {"scheduler.last_epoch": "0", "scheduler._last_lr[0]": "0.5"}.items()
    meter = {"avg": "0.25", "seen[0]": "1", "seen[1]": "'x'", "best": "np.float32(0.5)", "last": "tensor(2.0)"}
    assert {name: text for name, text in told.items() if name.startswith("meter")} == {
        f"meter.{name}": text for name, text in meter.items()
    }
    assert parts.keys() - told.keys() == {"replay", "generator"}


class StatefulLoader:
    """A loader that jumps to its place. Its batches tell where it is."""

    def __iter__(self) -> Any: ...

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class AverageMeter:
    """What many scripts have."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0


def test_attributes_of_a_plain_object_are_handed_over_as_the_error_says() -> None:
    """The object is filled where it is."""
    meter = AverageMeter()
    with pytest.raises(ConfigError, match=r"losses is of type AverageMeter.* run\.resumable\(losses=vars\(\.\.\.\)\)"):
        handed_over(losses=meter)
    handed_over(losses=vars(meter)).on_loaded({"state/losses": {"sum": 3.0, "count": 2}})
    assert (meter.sum, meter.count) == (3.0, 2)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.floats(width=32).map(np.float32)
    | st.sampled_from([torch.bfloat16, torch.int8])
    | st.lists(st.integers(-5, 5)).map(lambda items: np.array(items, dtype=np.int16))
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.booleans())


def kinds_of_sequence(items: list[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from([tuple(items), deque(items)])


TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner) | st.lists(inner).map(deque)
    ),
    max_leaves=20,
)


class Halves(torch.Tensor):
    """A tensor of two, by torch's protocol, as torchao's states of 8 bits are codes and scales."""

    def __new__(cls, one: torch.Tensor, two: torch.Tensor, name: str) -> Halves:
        made: Halves = cls._make_wrapper_subclass(cls, (2, *one.shape), dtype=one.dtype)
        return made

    def __init__(self, one: torch.Tensor, two: torch.Tensor, name: str) -> None:
        self.one, self.two, self.label = one, two, name

    def __tensor_flatten__(self) -> tuple[list[str], list[str]]:
        return ["one", "two"], [self.label]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: list[str], size: Any, stride: Any) -> Halves:
        return cls(parts["one"], parts["two"], *context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def through_a_checkpoint(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    text = json.dumps(encode(value, "it", tensors), allow_nan=False)
    return decode(json.loads(text), [tensor.clone() for tensor in tensors])


def is_same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(is_same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(two) and all(map(is_same, one, two))
    return one == two or (isinstance(one, float) and math.isnan(one) and math.isnan(two))


@given(TREES)
def test_any_tree_of_plain_values_comes_back_the_same(tree: Any) -> None:
    assert is_same(through_a_checkpoint(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": 0},
        {"a": {"$float": "1"}},
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({3: 2, 1: 1}),
        {1, 2, 3},
        frozenset({"a"}),
        bytearray(b"\xff\x00"),
        deque([1, 2], maxlen=2),
        torch.Size([2, 3]),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(1.5, dtype=torch.bfloat16),
        np.random.RandomState(1).get_state(legacy=False)["state"]["key"],
    ],
)
def test_what_json_has_no_word_for_comes_back_too(value: Any) -> None:
    again = through_a_checkpoint(value)
    assert is_same(again, value)
    if isinstance(value, deque):
        assert again.maxlen == value.maxlen


class Tagged(Tensor):
    """A subclass of which nothing is known but its name."""


def circle() -> list[Any]:
    """Return a list that holds itself, in a dictionary."""
    made: list[Any] = []
    made.append({"again": made})
    return made


#: Made within the test: torch warns of quantized tensors.
UNSAVABLE: dict[str, Callable[[], Any]] = {
    "function": lambda: print,
    "object": object,
    "complex number": lambda: 1j,
    "array of texts": lambda: np.array(["text"]),
    "other byte order": lambda: np.arange(3, dtype=np.dtype("<i4").newbyteorder()),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "subclass": lambda: torch.ones(3).as_subclass(Tagged),
}


@pytest.mark.parametrize("kind", UNSAVABLE)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_stored_is_refused_by_its_place(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.resumable: scheduler\.steps\[1\] is"):
        encode({"steps": [0, UNSAVABLE[kind]()]}, "scheduler", [])


def test_a_container_that_holds_itself_is_refused_by_its_place() -> None:
    shared = [1]
    assert encode([shared, shared], "progress", []) == [[1], [1]]
    with pytest.raises(ConfigError, match=r"run\.resumable: progress\.steps\[0\]\.again is one of the containers"):
        encode({"steps": circle()}, "progress", [])


def test_a_tensor_of_several_tensors_comes_back_from_what_is_imported_only() -> None:
    tensors: list[torch.Tensor] = []
    saved: Any = json.loads(json.dumps(encode({"a": Halves(torch.ones(3), torch.zeros(3), "odd")}, "it", tensors)))
    assert [type(tensor) for tensor in tensors] == [torch.Tensor] * 2
    found = decode(saved, tensors)["a"]
    assert type(found) is Halves
    assert (found.one.tolist(), found.two.tolist(), found.label, found.shape) == ([1.0] * 3, [0.0] * 3, "odd", (2, 3))
    for other in ("antigravity", "json"):  # one that is not imported, one without such a class
        saved["a"]["$subclass"]["class"][0] = other
        with pytest.raises(ConfigError, match=rf"a tensor of {other}\.Halves, which is not imported here"):
            decode(saved, tensors)
