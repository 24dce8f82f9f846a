"""Names by which Ray's dashboard shows whose an actor is."""

from __future__ import annotations

from springtide import config as configs
from springtide.ray.names import job_metadata, name_of, owner_of


def test_two_actors_of_one_role_have_different_names_of_one_owner() -> None:
    names = {name_of("mine", "worker") for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("mine/worker/") for name in names)


def test_what_trials_share_bears_the_name_of_their_sweep() -> None:
    config = configs.recipes.tiny().override({"run.root": "s3://bucket/runs/wide/trials", "run.id": "0003"})
    assert owner_of(config, is_trial=True) == "wide"
    assert owner_of(config, is_trial=False) == "0003"


def test_a_job_says_what_it_trains_and_no_password() -> None:
    changes = {"run.root": "/data/runs", "run.id": "mine", "track.mlflow_uri": "https://me:secret@tracking.example.org"}
    found = job_metadata(configs.recipes.tiny().override(changes))
    assert found["springtide.run"] == "mine"
    assert found["springtide.folder"] == "/data/runs/mine"
    assert found["springtide.report"] == "/data/runs/mine/report.html"
    assert "tracking.example.org" in found["springtide.mlflow"]
    assert "secret" not in str(found)
    assert job_metadata(configs.recipes.tiny()) == {}
