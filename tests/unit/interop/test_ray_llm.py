"""What ``model export --serve`` writes is what the installed Ray takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig  # ray.serve.llm itself needs vLLM
from ray.serve.schema import ServeDeploySchema

from springtide.errors import ConfigError
from springtide.interop.ray_llm import serve_config


@pytest.mark.parametrize("export", ["exports/mine", "s3://bucket/mine"])
def test_ray_reads_the_configuration_and_knows_each_of_its_fields(export: str) -> None:
    whole = yaml.safe_load(serve_config(export, "mine", 2048, (1, 3)))
    parsed = ServeDeploySchema.model_validate(whole)
    assert parsed.http_options.host == "127.0.0.1"
    [application] = parsed.applications
    assert application.import_path == "ray.serve.llm:build_openai_app"
    [one] = application.args["llm_configs"]
    assert one.keys() <= LLMConfig.model_fields.keys()  # it forbids no other
    config = LLMConfig.model_validate(one)
    assert config.model_id == "mine"
    loading = config.model_loading_config
    source = loading.model_source  # type: ignore[union-attr]
    assert source == str(Path(export).absolute()) if "://" not in export else source.bucket_uri == export
    assert config.deployment_config["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 3}


def test_a_store_that_it_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ray\.serve\.llm does not read"):
        serve_config("memory://mine", "mine", 2048)
