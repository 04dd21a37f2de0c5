"""The language model as users run it: killed and resumed, exported, loaded by transformers.

The resume is bit for bit.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.language_model import NO_TARGET, next_token, summed_cross_entropy
from jobs.llama import Llama, LlamaSizes
from toolkit.cli.main import main
from toolkit.files.rundir import all_runs
from toolkit.plugins.formats.tokens.folder import Tokens

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]
SMALL = [
    "params.layers=2",
    "params.width=32",
    "params.hidden=64",
    "data.global_batch_size=8",
    "checkpoint.every_steps=4",
]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Token shards of a few hundred documents."""
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": f"{number} and {number + 1} are {2 * number + 1}. " * 3}) for number in range(300)]
    path.write_text("\n".join(lines))
    assert main(["data", "tokenize", str(path), "--out", str(tmp_path / "tokens"), "--shard-tokens", "5000"]) == 0
    return tmp_path / "tokens"


def train(*words: str) -> None:
    """Run `toolkit` in a process of its own. It ends before the supervisor that it starts here."""
    done = subprocess.run([sys.executable, "-m", "toolkit", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.soak)])
def test_a_killed_run_has_the_same_bits_and_its_export_is_transformers_model(
    strategy: str, texts: Path, tmp_path: Path
) -> None:
    options = ["data.name=tokens", f"data.root={texts}", f"strategy.name={strategy}", *SMALL]
    at = ["--steps", "12", "--at", "7", "--seed", "1"]
    train("resume-check", "configs/gpt_fsdp.yaml", *options, *at, "--executor", "local", "--keep")
    out = tmp_path / "exported"
    assert main(["export", str(all_runs()[-1].path), str(out), "--format", "safetensors"]) == 0
    transformers: Any = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    ours = Llama(LlamaSizes.read(out / "config.json")).eval()
    assert not ours.load_state_dict(theirs.state_dict()).missing_keys
    tokens = torch.from_numpy(Tokens(texts).read(0, 128)).view(2, 64)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_a_pipeline_evaluates_like_one_process_and_says_what_it_cannot_show(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["data.name=tokens", f"data.root={texts}", *SMALL, "train.max_steps=4", "train.eval_every=2"]
    options += ["strategy={name: pipeline, mesh: {stages: 2, replicas: 1}}", "cluster.tasks_per_node=2"]
    train("submit", "configs/gpt_pipeline.yaml", *options, "--executor", "local", "--wait")
    run = all_runs()[-1]
    capsys.readouterr()  # what `toolkit data` has said
    assert main(["evaluate", run.id, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recorded"]["eval/perplexity"] == pytest.approx(found["metrics"]["eval/perplexity"], rel=1e-5)
    logs = "".join(path.read_text() for path in run.logs.rglob("rank-*.log"))
    assert logs.count("the job's show() is left out: strategy.name: pipeline makes one pass") == 2  # ranks
    # The stages of both ranks are one model again.
    assert main(["generate", run.id, "17 and ", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["continuations"]
    assert [row["prompt"] for row in rows] == ["17 and ", "3"]
    assert all(row["tokens"] > 0 or row["ended"] for row in rows)


def test_the_compiled_loss_is_the_plain_one_with_its_gradients() -> None:
    compiled = torch.compile(summed_cross_entropy)
    for size in (4, 3, 1):  # the last batch of an epoch has another size
        drawn, targets = torch.randn(size, 5, 50).bfloat16(), torch.randint(50, (size, 5))
        targets[0, :4] = NO_TARGET
        found, expected = (drawn.clone().requires_grad_() for _ in range(2))
        with torch.autocast("cpu", torch.bfloat16):
            ours, plain = next_token(found, targets, compiled), next_token(expected, targets)
        assert ours.total.dtype == plain.total.dtype == torch.float32
        torch.testing.assert_close(ours.total, plain.total, atol=1e-5, rtol=1e-6)
        for loss in (ours, plain):
            loss.total.backward()
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-2, rtol=1e-2)
