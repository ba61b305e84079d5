"""Checks the files for clusters: their syntax, their options, and that names and paths in them agree."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_jax.commands.train import module_of
from grpo_jax.options import option_types

FILES = {path.name: path for path in (Path(__file__).parents[2] / "examples/cluster").iterdir()}
CLAIM, POLICY, JOBSET = yaml.safe_load_all(FILES["jobset.yaml"].read_text())
JOBS = {job["name"]: job for job in JOBSET["spec"]["replicatedJobs"]}
SERVICES = yaml.safe_load(FILES["compose.yaml"].read_text())["services"]


def pod_of(job: Any) -> Any:
    return job["template"]["spec"]["template"]["spec"]


def addresses_in(text: str) -> list[str]:
    return re.findall(r"http://([\w.-]+):8000", text)


@pytest.mark.parametrize("name", FILES)
def test_options_of_the_files_exist(name):
    text = "\n".join(line for line in FILES[name].read_text().splitlines() if not line.startswith("#"))
    command = text[re.search(r"grpo-jax train|options=|      train ", text).start() :]  # type: ignore[union-attr]
    known = option_types(module_of("grpo").Config)
    flags = [flag.removeprefix("--").replace("-", "_") for flag in re.findall(r"--[a-z][a-z-]+", command)]
    assert len(flags) > 5
    assert {*flags} <= known.keys()


def test_servers_are_called_by_their_names():
    (trainer,) = pod_of(JOBS["trainer"])["containers"]
    # A pod is JOBSET-JOB-NUMBER-NUMBER in the domain of the JobSet.
    names = [f"grpo-server-{number}-0.grpo" for number in range(JOBS["server"]["replicas"])]
    assert addresses_in(trainer["args"][0]) == names
    assert addresses_in(SERVICES["trainer"]["command"]) == [name for name in SERVICES if name.startswith("server")]


def test_all_see_the_shared_folder():
    for job in JOBS.values():
        (container,), (volume,) = pod_of(job)["containers"], pod_of(job)["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/shared"}]
    assert all(service["volumes"] == ["./shared:/shared"] for service in SERVICES.values())


def test_only_pods_of_the_jobset_reach_the_servers():
    labels = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": JOBSET["metadata"]["name"]}}
    assert POLICY["spec"]["podSelector"] == labels
    assert POLICY["spec"]["ingress"] == [{"from": [{"podSelector": labels}]}]


def test_kubernetes_takes_the_objects():
    """JobSet has no schema there, but its jobs have."""
    validate = pytest.importorskip("kubernetes_validate").validate
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job["template"]["spec"]}
        for name, job in JOBS.items()
    ]
    for each in (CLAIM, POLICY, *jobs):
        validate(each, "1.30", strict=True)


@pytest.mark.parametrize(
    "script", [FILES["train.sbatch"].read_text(), pod_of(JOBS["trainer"])["containers"][0]["args"][0]]
)
def test_shells_can_read_the_scripts(script):
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
