"""The parts of `make gpu` that run on a CPU.

These are its trainings, its race of the loops at a tiny size, and its record.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet18

from tests.dist.ranks import run_ranks
from tests.gpu import figures, throughput, training
from toolkit.config import DistConfig

pytestmark = [pytest.mark.dist, pytest.mark.sample(6)]
TINY = throughput.GptSizes(layers=2, heads=2, width=16, vocabulary=64, length=8)


def tiny_gpt(device: torch.device) -> throughput.Work:
    return throughput.gpt(TINY, 2, "bf16", compile=False)


def tiny_images(device: torch.device) -> throughput.Work:
    return throughput.images(resnet18, 32, 2, "fp32")


ON_THE_CPU = [
    *("ddp", "ddp, bf16", "ddp, channels_last", "ddp, clipped", "ddp, sent as bf16", "ddp, sent as fp16"),
    *("ddp, sent by topk", "fsdp", "fsdp, two blocks ahead", "tensor", "pipeline"),
]


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_the_trainings_have_the_losses_of_a_loop_by_hand_on_the_cpu_too(name: str) -> None:
    case = training.CASES[name]
    for found, expected in run_ranks(2, training.both, case, job=DistConfig()):
        assert found["losses"] == pytest.approx(expected, rel=case.tolerance)
        assert (found["device"], found["fused"]) == ("cpu", case.is_fused)


@pytest.mark.parametrize("name", ["bf16", "clipped, judged, averaged"])
def test_the_steps_that_are_watched_for_waits_are_made(name: str) -> None:
    assert run_ranks(1, training.steps_without_sync, training.TRAINS[name], job=DistConfig()) == [20]


def test_the_report_of_a_hang_has_gloos_collectives() -> None:
    for text, names in run_ranks(2, training.hang_report, job=DistConfig()):
        assert "in hang_report" in text
        assert names.count("gloo:all_reduce") == 3


@pytest.mark.parametrize("make", [tiny_gpt, tiny_images])
def test_the_race_measures_both_loops(make: object) -> None:
    for found in run_ranks(2, throughput.race, make, 4, 2, job=DistConfig()):
        assert found.keys() == {"bare_samples_per_s", "ours_samples_per_s", "ours_of_bare"}
        assert all(value > 0 for value in found.values())


def test_the_gpts_operations_are_those_that_torch_counts() -> None:
    """torch counts products only, and all places of attention; a step is three passes."""
    sizes = throughput.GptSizes(layers=2, heads=4, width=128, vocabulary=512, length=64)
    model, tokens = throughput.Gpt(sizes), torch.zeros(1, sizes.length, dtype=torch.int64)
    # Of the CPU's fused attention torch 2.11 counts nothing.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens)
    assert 3 * counter.get_total_flops() == pytest.approx(sizes.flops_per_token * sizes.length, rel=0.01)


def test_nanogpts_shape_has_its_number_of_weights() -> None:
    """Counted as its get_num_params() does: without the embedding of positions."""
    with torch.device("meta"):
        model = throughput.Gpt(throughput.GptSizes())
    count = sum(parameter.numel() for parameter in model.parameters()) - model.places.weight.numel()
    assert count == 50_304 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768


def test_the_record_has_the_machine_and_each_tests_figures(tmp_path: Path) -> None:
    tests = [
        figures.Tested("test_a.py::test_fast", "passed", 1.25, {"mfu": 0.45678}),
        figures.Tested("test_a.py::test_b", "failed", 2.0, {}, "AssertionError: a | b"),
    ]
    figures.write(tests, figures.machine(), tmp_path / "out")
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["machine"]["torch"] == torch.__version__
    assert record["tests"][0]["figures"] == {"mfu": 0.45678}
    table = (tmp_path / "out.md").read_text().splitlines()
    assert table[-2:] == [
        "| test_a.py::test_fast | passed | 1.2 | mfu 0.4568 |",
        "| test_a.py::test_b | failed | 2.0 | AssertionError: a \\| b |",
    ]
