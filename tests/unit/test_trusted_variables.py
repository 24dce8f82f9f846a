"""Environment variables of a config from elsewhere: known ones pass, any other needs the trust that code needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import springtide as st
from springtide import config as configs
from springtide.checkpoint import leases
from springtide.cli.main import main
from springtide.config import Config
from springtide.config.elastic import ALLOWED_ENV
from springtide.errors import ConfigError
from springtide.storage import Folder

HARMFUL = [
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "LD_AUDIT",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONHOME",
    "PATH",
    "CC",
    "CXX",
    "HOME",
    "NCCL_NET_PLUGIN",
    "NCCL_TUNER_PLUGIN",
    "NCCL_PROFILER_PLUGIN",
    "NCCL_CONF_FILE",
    "NCCL_DEBUG_FILE",
    "NCCL_TOPO_DUMP_FILE",
    "NCCL_TOPO_FILE",
    "NCCL_COMM_ID",
    "CUDA_INJECTION64_PATH",
    "RDMAV_DRIVERS",
    "FI_PROVIDER_PATH",
    "UCX_MODULE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCH_LOGS",
    "TORCH_TRACE",
    "TORCH_CUDNN_V8_API_ENABLED_X",
    "GCONV_PATH",
    "PYTORCH_JIT_LOG_LEVEL",
    "MKL_RT_PATH",
    "OMP_TOOL_LIBRARIES",
    "HTTPS_PROXY",
    "HF_ENDPOINT",
]
GIVEN = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}


def _saved(config: Config, **variables: str) -> Config:
    config = config.override({"elastic.env": variables, "elastic.gpus_per_worker": 1.0})
    Path("config.yaml").write_text(configs.dump(config))
    return config


@pytest.fixture
def mine(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tiny.override({"run.id": "mine", "run.root": str(tmp_path / "runs")})


@pytest.mark.parametrize("name", HARMFUL)
def test_an_unknown_variable_from_a_file_needs_trust(mine: Config, name: str) -> None:
    _saved(mine, **GIVEN, **{name: "/tmp/evil"})
    with pytest.raises(ConfigError, match="--trust-code") as error:
        st.load_config("config.yaml")
    assert f"elastic.env.{name} = '/tmp/evil': is a variable that config.yaml names" in str(error.value)
    assert st.load_config("config.yaml", trust_code=True).elastic.env[name] == "/tmp/evil"


def test_a_known_variable_with_the_value_of_another_needs_trust(mine: Config) -> None:
    """Ray replaces ``${NAME}``, and NCCL logs the name of its interface."""
    _saved(mine, NCCL_SOCKET_IFNAME="${AWS_SECRET_ACCESS_KEY}")
    with pytest.raises(ConfigError, match="NCCL_SOCKET_IFNAME"):
        st.load_config("config.yaml")


def test_a_known_variable_needs_none(mine: Config) -> None:
    assert not ALLOWED_ENV & set(HARMFUL)
    saved = _saved(mine, **GIVEN)
    assert st.load_config("config.yaml") == saved


def test_the_variables_of_the_guide_need_none() -> None:
    """Each variable in the table and in the examples of docs/how-to/gpus.md, but the two that it warns of."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "gpus.md").read_text()
    named = set(re.findall(r"\b(?:NCCL|GLOO|FI|PYTORCH)_[A-Z0-9_]+[A-Z0-9]\b", page)) - {"NCCL_NET_PLUGIN"}
    assert len(named) > 6
    assert named <= ALLOWED_ENV


@pytest.mark.processes
def test_the_command_line_is_trusted(mine: Config, capsys: pytest.CaptureFixture[str]) -> None:
    _saved(mine, PYTHONPATH="evil")
    arguments = ["train", "--config", "config.yaml", "--dry-run", "--elastic.gpus-per-worker", "0"]
    assert main(arguments) == 2
    assert "elastic.env.PYTHONPATH" in capsys.readouterr().err
    assert main([*arguments, "--elastic.env", "{LD_PRELOAD: mine.so}"]) == 0


@pytest.mark.processes
def test_a_resume_trusts_the_value_of_the_claim_only(mine: Config, capsys: pytest.CaptureFixture[str]) -> None:
    config = mine.override({"elastic.env": {"TORCH_LOGS": "+dynamo"}})
    run = Folder(config.run.root) / "mine"
    run.write("config.yaml", configs.dump(config))
    resume = ["train", "--config", run.where("config.yaml"), "--resume", "--dry-run"]
    assert main(resume) == 2
    assert "--trust-code" in capsys.readouterr().err, "nobody has started it"
    leases.end(run, leases.claim(run, "driver", trains=False, sources=config.needs_trust).term)
    assert main(resume) == 0
    run.write("config.yaml", configs.dump(config.override({"elastic.env": {"TORCH_LOGS": "+evil.module"}})))
    assert main(resume) == 2
    said = capsys.readouterr().err
    assert "elastic.env.TORCH_LOGS = '+evil.module'" in said
    assert "it has changed since you trusted it" in said


def test_a_value_is_printable_and_short(mine: Config) -> None:
    for value in ("a\nb", "a\x00b", "\x1b[2J", "x" * 4097):
        with pytest.raises(ConfigError, match=r"elastic\.env\.NCCL_DEBUG"):
            mine.override({"elastic.env": {"NCCL_DEBUG": value}})
