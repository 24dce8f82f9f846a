"""No password of a URL is in anything that is shown, logged or sent; a run that has one still resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_events import step

from springtide import config as configs
from springtide.api import train
from springtide.checkpoint.format import read_manifest
from springtide.cli.main import main
from springtide.config import Config
from springtide.errors import ConfigError, RunExists, explain, redacted
from springtide.events import SaveFailed, Stopped
from springtide.run.folder import open_run
from springtide.storage import Folder
from springtide.tracking.journal import Journal, read_journal
from springtide.tracking.mlflow_sink import MlflowSink

URI = "postgresql://ml:hunter2@127.0.0.1:9/mlflow"
SOURCE = "https://u:hunter2@127.0.0.1:9/text.jsonl?X-Amz-Signature=hunter2"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URI, "postgresql://ml:***@127.0.0.1:9/mlflow"),
        ("https://ml:hu@nter:2@mlflow.corp/a?b=c", "https://ml:***@mlflow.corp/a?b=c"),
        ("https://ghp_hunter2@github.com/me/it", "https://***@github.com/me/it"),
        ("redis://:hunter2@host", "redis://:***@host"),
        (
            "s3://b/k?X-Amz-Credential=a%2Fb&x=1&X-Amz-Signature=hunter2",
            "s3://b/k?X-Amz-Credential=***&x=1&X-Amz-Signature=***",
        ),
        ("https://a.blob.core/c?sv=1&sig=hunter2&se=2", "https://a.blob.core/c?sv=1&sig=***&se=2"),
        ("of 'https://h/f?token=hunter2': gone", "of 'https://h/f?token=***': gone"),
        ("postgresql://h/db?user=ml&password=hunter2#x", "postgresql://h/db?user=ml&password=***#x"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("https://me:hun/ter?2#x@host/a", "https://me:***@host/a"),
        ("https://me:hun/ter2@host/pkg@v1", "https://me:***@host/pkg@v1"),
        ("http://host:8080/?who=a@b and http://host:/a@b", "http://host:8080/?who=a@b and http://host:/a@b"),
        *(
            (f"https://h/f?a=1&{name}=hunter2&b=2", f"https://h/f?a=1&{name}=***&b=2")
            for name in (
                *(
                    "jwt",
                    "auth",
                    "client_secret",
                    "sas",
                    "code",
                    "Authorization",
                    "refresh_token",
                    "id_token",
                    "bearer",
                ),
                *(
                    "X-Amz-Security-Token",
                    "AWSAccessKeyId",
                    "aws_secret_access_key",
                    "api-key",
                    "apikey",
                    "private_key",
                ),
                *("client_assertion", "session_token", "db.password", "passphrase", "credentials"),
            )
        ),
        ("https://h/#access_token=hunter2&state=1", "https://h/#access_token=***&state=1"),
        ("https://h/f?max_tokens=5&codec=x&author=me", "https://h/f?max_tokens=5&codec=x&author=me"),
        ("http://host:8080/a@b and a:b@c", "http://host:8080/a@b and a:b@c"),
        ("step 4: loss 3, key = 5; s3://bucket/runs", "step 4: loss 3, key = 5; s3://bucket/runs"),
    ],
)
def test_secrets_in_a_url_are_hidden_and_the_rest_stays(text: str, shown: str) -> None:
    """What is secret in a URL is hidden and all else stays."""
    assert redacted(text) == shown
    assert redacted(shown) == shown


@given(st.text(st.characters(blacklist_characters="/?#", blacklist_categories=["Cs", "Z", "C"]), min_size=1), st.text())
def test_no_password_is_left_over(password: str, before: str) -> None:
    assert redacted(f"{before} mysql://u:{password}@host/db").endswith(" mysql://u:***@host/db")


@pytest.mark.parametrize("part", ["a", "://", "://a:", "://a", "://a:/", "?token=", "@", "?a_", "#-", "://a:?b/"])
def test_a_long_text_of_a_hostile_file_is_searched_once(part: str) -> None:
    """A search that is quadratic in the text's length would take hours here."""
    redacted(part * (2_000_000 // len(part)))


def test_a_config_without_its_secrets_is_a_config() -> None:
    mixture = {"web": "https://u:hunter2@host/web", "code": "s3://bucket/code"}
    config = Config().override({"track.mlflow_uri": URI, "stream.mixture": mixture})
    assert configs.secret_fields(config) == ["stream.mixture", "track.mlflow_uri"]
    shown = configs.redact(config)
    assert shown.stream.mixture == {"web": "https://u:***@host/web", "code": "s3://bucket/code"}
    assert configs.secret_fields(shown) == []
    assert configs.redact(Config()) == Config()


def test_errors_hide_them() -> None:
    assert "hunter2" not in explain("track.mlflow_uri", URI, "cannot be reached", "start it")
    with pytest.raises(ConfigError) as unknown:
        Config().override({"track.mlflow_urj": URI})
    other = Config().override({"train.start_from": URI})
    with pytest.raises(RunExists) as changed:
        configs.check_same_run(Config(), other, accept_changes=False)
    for found in (unknown, changed):
        assert "***" in str(found.value)
        assert "hunter2" not in str(found.value)


def test_another_password_trains_the_same_run() -> None:
    """Another password trains the same run and its fingerprint tells nothing of it."""
    old = Config().override({"corpus.source": SOURCE})
    new = old.override({"corpus.source": SOURCE.replace("hunter2", "hunter3")})
    assert configs.fingerprint(old) == configs.fingerprint(new) == configs.fingerprint(configs.redact(old))
    configs.check_same_run(old, new, accept_changes=False)
    elsewhere = old.override({"corpus.source": SOURCE.replace("text", "other")})
    assert configs.fingerprint(elsewhere) != configs.fingerprint(old)
    with pytest.raises(RunExists, match=r"corpus\.source"):
        configs.check_same_run(old, elsewhere, accept_changes=False)


def _train(config: Config, folder: Path) -> None:
    """As ``torchrun`` would, alone."""
    file = folder / "typed.yaml"
    file.write_text(configs.dump(config))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-m", "springtide.training", "--config", str(file)]
    done = subprocess.run(
        command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.processes
def test_only_the_config_of_a_run_has_the_password(
    tiny: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all that a run writes only its config has the password."""
    root = tmp_path / "runs?sig=hunter2"  # a folder here, and a signature wherever its name is quoted
    changes = {"run.id": "run", "track.mlflow_uri": URI, "train.eval_tokens": 0, "optim.warmup": 0}
    changes |= {"run.root": str(root), "corpus.source": SOURCE}
    config = tiny.override({**changes, "train.total": 2 * tiny.tokens_per_step})
    _train(config, tmp_path)
    run = open_run(str(root / "run"))
    assert run.config == config, "what it resumes with is whole"
    [name] = run.checkpoints
    saved = configs.build(read_manifest(run.folder, name).config)
    assert (saved.track.mlflow_uri, saved.corpus.source) == (redacted(URI), redacted(SOURCE))

    tags = {"springtide.dataset": "https://u:hunter2@host/data"}
    with (
        Journal(run.folder) as journal,
        MlflowSink(configs.flatten(configs.redact(config)), run.folder, URI, list, tags, grace_s=0.1) as away,
    ):
        for event in (
            step(3),
            SaveFailed(step=3, reason=f"PUT {URI}?sig=hunter2 failed", in_a_row=1),
            Stopped(step=3, status="failed", reason=f"OperationalError: {URI}"),
        ):
            journal(event)
            away(event)
    with MlflowSink(
        configs.flatten(configs.redact(config)),
        run.folder,
        f"sqlite:///{tmp_path}/mlflow.db",
        lambda: read_journal(run.folder),
        tags,
        grace_s=300.0,
    ):
        pass
    run.write_report()
    assert (
        main(["data", "prepare", "--config", str(root / "run" / "config.yaml"), "--save", str(root / "twin.yaml")]) == 0
    )
    assert main(["inspect", str(root / "run")]) == 0

    assert "reached" in caplog.text
    assert "hunter2" not in caplog.text
    assert "hunter2" not in "".join(capsys.readouterr())
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert sorted(holders) == [root / "run" / "config.yaml", root / "twin.yaml", tmp_path / "typed.yaml"]
    holders.remove(tmp_path / "typed.yaml")  # the user's own
    assert [path.stat().st_mode & 0o777 for path in holders] == [0o600, 0o600]
    for shown in ("report.html", "mlflow.json"):
        assert (root / "run" / shown).stat().st_mode & 0o044
    run.write_config(tiny)
    assert (root / "run" / "config.yaml").stat().st_mode & 0o044


def test_a_config_on_an_object_store_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    run = train.Run(Folder("memory://secrets/run"))
    run.write_config(Config())
    assert caplog.text == ""
    run.write_config(Config().override({"track.mlflow_uri": URI}))
    assert "track.mlflow_uri" in caplog.text
