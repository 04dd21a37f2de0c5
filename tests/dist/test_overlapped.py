"""fp16 and bf16 sent by DDP's hooks, beside a send after the backward pass.

Both give the same bits. The hooks are those for NCCL, which is not here: over gloo each call waits. Stand-ins for
torch.cuda's streams note the calls that the hooks enqueue on each stream of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist.objectives import cross_entropy
from tests.dist.ranks import refused_with, run_ranks
from tests.dist.strategy_cases import CLASSES, FEATURES, OPTIMIZERS, part, plain_model, token_loss
from tests.process_limits import ChangeLimits
from toolkit.config import StrategyConfig, TrainConfig
from toolkit.plugins.methods import compressed as layouts
from toolkit.plugins.methods.compressed import Compressed, Overlapped, _BucketHook
from toolkit.plugins.methods.compression_schemes import BlockQuantization
from toolkit.ranks.session import Session
from toolkit.strategies import Strategy, build_strategy, criterion_objective

pytestmark = pytest.mark.dist
STEPS = 3


def wide_model() -> nn.Module:
    """More than DDP's first bucket of 1 MiB holds."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, CLASSES))


def trained(session: Session, config: StrategyConfig, train: TrainConfig, criterion: Any, model: Any) -> Strategy:
    strategy = build_strategy(config, session, train)
    strategy.build(model, OPTIMIZERS["sgd"], criterion_objective(criterion), part(strategy.share, 0))
    for step in range(STEPS):
        strategy.step(part(strategy.share, step), 0.1)
    return strategy


def as_over_nccl(group: Any = None) -> str:
    return "nccl"


def both(
    session: Session, kind: str, train: TrainConfig, criterion: Any, model: Any
) -> tuple[list[Tensor], list[Tensor], dict[str, float], list[int]]:
    """Return the weights of both ways, the hooks' figures, and the buckets they sent."""
    config = StrategyConfig("ddp", compression=kind)
    late = trained(session, config, train, criterion, model)
    assert isinstance(late._layout, Compressed)  # type: ignore[attr-defined]
    sent: list[int] = []
    send = _BucketHook.send

    def noted(sender: _BucketHook, bucket: dist.GradBucket) -> Any:
        sent.append(bucket.index())
        return send(sender, bucket)

    _BucketHook.send = noted  # type: ignore[assignment]
    dist.get_backend = as_over_nccl
    early = trained(session, config, train, criterion, model)
    assert isinstance(early._layout, Overlapped)  # type: ignore[attr-defined]
    weights = [[value.clone() for value in strategy.live_state().values()] for strategy in (late, early)]
    return weights[0], weights[1], dict(early.step_metrics()), sent  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [TrainConfig(), TrainConfig(accumulate=2, clip_norm=0.1)], ids=["plain", "in parts"])
def test_bf16_has_the_bits_that_it_has_when_sent_after_the_backward_pass(train: TrainConfig) -> None:
    for late, early, figures, sent in run_ranks(3, both, "bf16", train, cross_entropy, wide_model):
        assert all(map(torch.equal, late, early))
        # The first pass is priming; DDP divides its buckets anew after it.
        steps = "".join(map(str, sent)).split("0")[2:]
        assert steps == steps[:1] * STEPS, "the same buckets in each step, sent once"
        assert steps[0], "and more than one of them"
        assert 0.49 < figures["compression/sent_bytes"] / figures["compression/plain_bytes"] < 0.52


@pytest.mark.parametrize(("kind", "criterion"), [("fp16", cross_entropy), ("bf16", token_loss)])
def test_other_blocks_and_later_weights_change_only_the_rounding(kind: str, criterion: Any) -> None:
    """In DDP's buckets fp16's blocks of 256 values are cut differently. A weighted loss is weighed after the send."""
    for late, early, *_ in run_ranks(3, both, kind, TrainConfig(), criterion, plain_model):
        for one, other in zip(late, early, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)


def refused(session: Session) -> str:
    dist.get_backend = as_over_nccl
    model = partial(nn.Linear, FEATURES, CLASSES, dtype=torch.float64)
    return refused_with(
        lambda: trained(session, StrategyConfig("ddp", compression="bf16"), TrainConfig(), cross_entropy, model)
    )


def test_a_type_that_would_be_rounded_is_refused_by_name() -> None:
    (said,) = run_ranks(1, refused)
    assert "weight (torch.float64)" in said


def other_layouts(session: Session) -> list[str]:
    dist.get_backend = as_over_nccl
    configs: list[dict[str, Any]] = [
        {"compression": "topk"},
        {"compression": "bf16", "compression_layers": {"0.*": "none"}},
    ]
    made = [build_strategy(StrategyConfig("ddp", **config), session) for config in configs]
    return [type(strategy._layout).__name__ for strategy in made]  # type: ignore[attr-defined]


def test_what_is_kept_for_later_and_what_is_left_out_goes_after_the_backward_pass() -> None:
    assert run_ranks(1, other_layouts) == [["Compressed", "Compressed"]]


class Bucket:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def index(self) -> int:
        return 0

    def buffer(self) -> Tensor:
        return self.values


class Stream:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.device = name, calls, torch.device("cpu")

    def wait_stream(self, other: Stream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


def test_on_a_gpu_sending_waits_for_the_gradients_and_the_future_for_sending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    on = ["backward"]

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        on.append(chosen.name)
        yield
        on.pop()

    class Scheme:
        multiple = 8

        def average(self, values: Tensor) -> Tensor:
            calls.append(f"exchange on {on[-1]}")
            assert values.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
            return values * 2

    class Future:
        def __init__(self, devices: list[torch.device]) -> None:
            calls.append(f"future on {len(devices)} device")

        def set_result(self, value: Tensor) -> None:
            calls.append(f"result on {on[-1]}")
            self.value = value

    class Wire:
        sent_bytes = 7.0

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("sending", calls))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(on[-1], calls))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(layouts, "Future", Future)
    wire: Any = Wire()
    sender = _BucketHook(Scheme(), wire, torch.device("cuda", 0))  # type: ignore[arg-type]
    sender._device = torch.device("cpu")
    gradients = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    sent: Any = sender.send(Bucket(gradients))  # type: ignore[arg-type]
    assert calls == ["future on 1 device", "sending waits for backward", "exchange on sending", "result on sending"]
    assert sent.value is gradients
    assert gradients.tolist() == [2, 4, 6]
    assert wire.sent_bytes == 0


class Alone:
    """A wire of three ranks that all have the same vector."""

    ranks, rank = 3, 1

    def all_to_all(self, rows: Tensor) -> Tensor:
        return rows[1].expand_as(rows).contiguous()

    def all_gather(self, row: Tensor) -> Tensor:
        return row.expand(3, -1).contiguous()


@pytest.mark.parametrize("codec", ["Fp16", "Bf16", "Int8"])
def test_the_bits_do_not_depend_on_how_much_is_worked_on_at_a_time(codec: str, change_limits: ChangeLimits) -> None:
    from toolkit.plugins.methods import compression_schemes as compression

    change_limits(compressed_at_once=7)  # 2 blocks of each rank: the last piece is shorter
    found = []
    for kind in ("cpu", "cuda"):
        values = torch.randn(3 * 5 * 256, generator=torch.Generator().manual_seed(0))
        wire: Any = Alone()
        mean = BlockQuantization(getattr(compression, codec)(), wire, feeds_back=True, kind=kind).average(values)
        found.append((mean, values))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
