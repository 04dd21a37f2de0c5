import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from jobs import language_model
from jobs.language_model import LanguageModel, Params, continued, next_token
from jobs.llama import Llama, LlamaSizes
from toolkit import ConfigError, JobConfig

SIZES = LlamaSizes(50, layers=2, width=24, heads=6, kv_heads=2, hidden=40)


def llama(sizes: LlamaSizes = SIZES) -> Llama:
    torch.manual_seed(0)
    return Llama(sizes).eval()


def packed(*documents: Tensor) -> Tensor:
    """Return documents in one row, each token with its place."""
    places = torch.cat([torch.arange(len(document)) for document in documents])
    return torch.stack([torch.cat(documents), places], -1)[None]


def test_a_token_changes_what_follows_from_it_and_nothing_before() -> None:
    model, inputs = llama(), torch.randint(50, (1, 10))
    other = inputs.clone()
    other[0, 6] = (other[0, 6] + 1) % 50
    one, two = model(inputs), model(other)
    assert one.shape == (1, 10, 50)
    assert torch.equal(one[:, :6], two[:, :6])
    assert not torch.isclose(one[:, 6:], two[:, 6:]).all(-1).any()


def test_a_packed_document_has_the_logits_that_it_has_alone() -> None:
    model = llama()
    documents = [torch.randint(50, (length,)) for length in (5, 1, 9)]
    alone = torch.cat([model(document[None])[0] for document in documents])
    torch.testing.assert_close(model(packed(*documents))[0], alone, atol=1e-6, rtol=0)


def test_rows_with_other_documents_and_changed_places_get_their_own_masks() -> None:
    model = llama()
    one, two = packed(torch.arange(9)), packed(torch.arange(4), torch.arange(5))
    both = model(torch.cat([one, two]))
    torch.testing.assert_close(both, torch.cat([model(one), model(two)]), atol=1e-6, rtol=0)
    changed = one.clone()
    before = model(changed)
    changed.copy_(two)  # the same tensor with another content
    torch.testing.assert_close(model(changed), both[1:], atol=1e-6, rtol=0)
    assert not torch.allclose(before, model(changed))


def test_the_loss_is_the_mean_over_the_tokens_that_count() -> None:
    logits, targets = torch.randn(3, 5, 50), torch.randint(50, (3, 5))
    targets[0, :4] = -100
    loss = next_token(logits, targets)
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert loss.weight.item() == 11
    torch.testing.assert_close(loss.total / loss.weight, expected)


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 20}


@pytest.mark.parametrize(
    ("tied", "scaling"),
    [
        (False, None),
        (True, None),
        (False, {"rope_type": "linear", "factor": 2.5}),
        (False, {"rope_type": "llama3", **LLAMA3}),
    ],
)
def test_logits_and_loss_are_those_of_transformers(tied: bool, scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=40,
        rope_theta=5e4,
        rope_scaling=scaling and dict(scaling),  # they add to it
        initializer_range=0.3,  # so that places count
        tie_word_embeddings=tied,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    sizes = LlamaSizes.read(tmp_path / "config.json")
    assert sizes.rope_scaling == scaling
    ours = llama(sizes)
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(50, (2, 33))
    wanted = theirs(tokens, labels=tokens)
    torch.testing.assert_close(ours(tokens), wanted.logits, atol=1e-4, rtol=0)
    loss = next_token(ours(tokens[:, :-1]), tokens[:, 1:])
    assert (loss.total / loss.weight).item() == pytest.approx(wanted.loss.item(), abs=1e-5)
    if scaling:
        plain = llama(replace(sizes, rope_scaling=None))
        plain.load_state_dict(theirs.state_dict())
        assert (plain(tokens) - wanted.logits).abs().max() > 0.1
    # And back: what we write gives them the same model.
    (tmp_path / "config.json").write_text(json.dumps(sizes.hugging_face(64)))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(tokens).logits, wanted.logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mistral"}, "model_type is mistral"),
        ({"attention_bias": True}, "attention_bias is True"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type is yarn, and .* has default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "linear"}}, "has no 'factor'"),
        ({"head_dim": 7}, "head_dim is not"),
        ({"num_key_value_heads": 4}, "params.kv_heads: 4 does not divide"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
    ],
)
def test_a_config_of_another_model_is_refused_by_its_key(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    config = {key: value for key, value in {**SIZES.hugging_face(64), **change}.items() if value is not None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=says):
        LlamaSizes.read(path)


def test_sizes_come_back_from_their_own_config() -> None:
    assert LlamaSizes.of_hugging_face(SIZES.hugging_face(64), "here") == SIZES


def test_the_operations_of_a_token_are_six_for_each_weight_and_those_of_attention() -> None:
    weights = sum(parameter.numel() for parameter in llama().parameters() if parameter.ndim == 2)
    embedding = 50 * 24
    assert SIZES.flops_per_token(64) == 6 * (weights - embedding) + 12 * 2 * 24 * 64


def test_a_continuation_keeps_its_beginning_and_is_drawn_from_the_model() -> None:
    model, window = llama(), torch.randint(50, (1, 12))
    kept = window.clone()
    found = continued(model, window, 4, 9)
    assert torch.equal(window, kept)
    assert found.shape == (1, 9)
    assert torch.equal(found[:, :4], window[:, :4])
    assert torch.equal(found, continued(model, window, 4, 9))
    # Of a model that is sure of what follows nothing else is drawn.
    sure = continued(lambda tokens: 1e4 * functional.one_hot((tokens + 1) % 50, 50), window, 4, 99)
    assert sure[0, 4:].tolist() == [(window[0, 3].item() + n) % 50 for n in range(1, 9)]


def test_the_speed_is_in_tokens_and_in_parts_of_what_the_devices_can_do() -> None:
    config = JobConfig(job="jobs.language_model")
    config.cluster.tasks_per_node = 2
    job = object.__new__(LanguageModel)
    job.config, job.params, job.device, job.sizes = config, Params(length=64), torch.device("cpu"), SIZES
    assert job.speed(10.0) == {"train/tokens_per_s": 640.0}
    job.params.peak_flops = 1e6
    assert job.speed(10.0)["train/mfu"] == pytest.approx(640 * SIZES.flops_per_token(64) / 2e6)


def test_the_job_is_short_enough_to_copy() -> None:
    source = Path(language_model.__file__).read_text()
    assert ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) <= 200
