"""Secrets: their sources, what is refused, and that no error shows one."""

import io
import logging
import os
import sys
from pathlib import Path

import pytest

from toolkit import config as configs
from toolkit.base import secret_values
from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig
from toolkit.files import error_file
from toolkit.files.rundir import RunDir

VALUE = "hunter2-correct-horse"


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with a secret. The variables that a rank sets are unset again."""
    for name in ("API_TOKEN", secret_values.NAMES_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(secret_values, "_given", {})
    path = tmp_path / "token"
    path.write_text(f"{VALUE}\n")
    path.chmod(0o600)
    return path


def refused(secrets: dict[str, str]) -> str:
    config = JobConfig(job=configs.SCRIPT_JOB, secrets=secrets)
    with pytest.raises(ConfigError) as caught:
        configs.validate(config)
    assert VALUE not in str(caught.value)
    return str(caught.value)


def test_a_rank_gets_the_secrets_of_its_files_and_of_its_environment(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "from-the-shell")
    secrets = {"API_TOKEN": str(token), "WANDB_API_KEY": "env"}
    configs.validate(JobConfig(job=configs.SCRIPT_JOB, secrets=secrets))
    assert "API_TOKEN" not in os.environ
    secret_values.give_to_rank(secrets)
    assert os.environ["API_TOKEN"] == VALUE
    assert secret_values.masked(f"{VALUE} from-the-shell") == "[secret API_TOKEN] [secret WANDB_API_KEY]"


def test_a_secret_that_left_the_environment_is_masked_as_before(token: Path) -> None:
    secret_values.give_to_rank({"API_TOKEN": str(token)})
    del os.environ["API_TOKEN"], os.environ[secret_values.NAMES_VARIABLE]
    assert secret_values.masked(f"the token is {VALUE}") == "the token is [secret API_TOKEN]"


def test_a_secret_that_is_part_of_another_leaves_nothing_of_it(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_PART", VALUE[:10])
    secret_values.give_to_rank({"A_PART": "env", "API_TOKEN": str(token)})
    assert secret_values.masked(f"{VALUE} {VALUE[:10]}") == "[secret API_TOKEN] [secret A_PART]"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_or_write_is_refused(token: Path, mode: int) -> None:
    token.chmod(mode)
    error = refused({"API_TOKEN": str(token)})
    assert error.startswith("secrets.API_TOKEN: ")
    assert f"mode {mode:04o}" in error
    assert "chmod 600" in error


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(token: Path) -> None:
    os.chown(token, 1, 1)
    assert "belongs to daemon" in refused({"API_TOKEN": str(token)})


def test_a_file_that_is_missing_empty_or_no_file_is_refused(token: Path) -> None:
    assert "cannot be read: No such file" in refused({"API_TOKEN": f"{token}.lost"})
    assert "Is a directory" in refused({"API_TOKEN": str(token.parent)})
    for content in (b"", b"\n", b"\xff\xfe", b"a\0b", b"x" * 200_000):
        token.write_bytes(content)
        assert "must hold the secret as text" in refused({"API_TOKEN": str(token)})


def test_a_pipe_is_refused_at_once(token: Path) -> None:
    token.unlink()
    os.mkfifo(token, 0o600)
    assert "it is a pipe or a device" in refused({"API_TOKEN": str(token)})


def test_a_variable_that_is_not_set_is_refused_with_its_name(token: Path) -> None:
    assert "the variable API_TOKEN is not set" in refused({"API_TOKEN": "env"})


@pytest.mark.parametrize(
    "name",
    [
        *("A-B", "1A", "A B", "SLURM_JOB_ID", "RANK", "LOCAL_RANK", "MASTER_ADDR", "PMI_RANK"),
        *("PATH", "HOME", "USER", "SHELL", "LD_PRELOAD", "PYTHONPATH"),
    ],
)
def test_a_name_that_ranks_or_programs_use_otherwise_is_refused(token: Path, name: str) -> None:
    assert "cannot be the name of a secret" in refused({name: str(token)})


def test_no_error_shows_a_secret_that_stands_where_its_source_belongs(tmp_path: Path) -> None:
    assert "never the secret itself" in refused({"API_TOKEN": VALUE})
    assert "never the secret itself" in refused({"API_TOKEN": f"{VALUE}\n{VALUE}"})
    file = tmp_path / "number.yaml"
    file.write_text("secrets: {API_TOKEN: 739154682}\n")
    for path, overrides in ((file, []), (None, ["secrets.API_TOKEN=739154682"])):
        with pytest.raises(ConfigError) as caught:
            configs.load_config(path, overrides)
        assert "secrets.API_TOKEN" in str(caught.value)
        assert "739154682" not in str(caught.value)


def test_output_log_and_error_file_of_a_rank_mask_its_secrets(
    token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, errors = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    handler = logging.StreamHandler(errors)  # made before, as libraries do
    secret_values.give_to_rank({"API_TOKEN": str(token)})
    secret_values.give_to_rank({"API_TOKEN": str(token)})  # as in a script with toolkit.start()
    print("the token is", VALUE)
    output.writelines([f"{VALUE}\n"])
    handler.handle(logging.LogRecord("x", logging.INFO, "x", 1, "log %s", (VALUE,), None))
    for stream in (output, errors):
        stream.seek(0)
    assert output.read() == "the token is [secret API_TOKEN]\n[secret API_TOKEN]\n"
    assert errors.read() == "log [secret API_TOKEN]\n"
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    monkeypatch.setenv("TOOLKIT_RUN_DIR", str(run.path))
    error_file.write(ValueError(f"401 for {VALUE}"), 0)
    assert "401 for [secret API_TOKEN]" in run.error_file(1, 0).read_text()
    assert VALUE not in run.error_file(1, 0).read_text()


def test_a_secret_of_eight_characters_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_values, "_given", {"KEY": "12345678", "SHORT": "1234567"})
    monkeypatch.delenv(secret_values.NAMES_VARIABLE, raising=False)
    assert secret_values.masked("12345678") == "[secret KEY]"


@pytest.mark.usefixtures("token")
def test_a_process_that_a_rank_has_started_masks_what_its_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret_values.NAMES_VARIABLE, "KEY")
    monkeypatch.setenv("KEY", "abcdefghij")
    assert secret_values.masked("x abcdefghij") == "x [secret KEY]"
