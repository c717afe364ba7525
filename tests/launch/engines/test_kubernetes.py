"""``--on kubernetes``: what pods are given, when they are started again, and how kubectl is used."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from kubernetes_cases import (
    EVERYTHING,
    KINDS,
    NEEDED,
    check_schema,
    documents_of,
    job_of,
    job_spec_of,
    pod_of,
)

from paceline.config import load
from paceline.errors import ConfigError, LaunchError, RankFailed
from paceline.launch import exit_codes
from paceline.launch.engines.kubernetes import KubernetesEngine, cluster_name, manifest
from paceline.launch.engines.submission import read_submission


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_meets_the_schema_of_its_kind(kind):
    cases = [
        job_of({**NEEDED, "kind": kind}),
        job_of({**NEEDED, "kind": kind}, nnodes=1),
        job_of({**EVERYTHING, "kind": kind}, nnodes="2:4", env={"NCCL_DEBUG": "INFO"}),
    ]
    if kind != "trainjob":
        cases.append(job_of({**NEEDED, "kind": kind, "keep": 0}))
    for job in cases:
        for document in documents_of(job).values():
            check_schema(document)


def test_the_schemas_refuse_what_they_do_not_know():
    found = {
        k: v for kind in KINDS for k, v in documents_of(job_of({**NEEDED, "kind": kind})).items()
    }
    assert set(found) == {
        *("ConfigMap", "Service", "Job", "JobSet", "TrainJob", "TrainingRuntime", "PyTorchJob")
    }
    for document in found.values():
        with pytest.raises(Exception):  # noqa: B017, PT011 - each validator has its own
            check_schema({**document, "unheardOf": 1})
    pod_of({"PyTorchJob": found["PyTorchJob"]})["containers"][0]["comand"] = ["x"]
    with pytest.raises(Exception, match="comand"):
        check_schema(found["PyTorchJob"])


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_closed_and_have_what_training_needs(kind):
    pod = pod_of(documents_of(job_of({**NEEDED, "kind": kind, "gpus": 4}, grace=20.5)))
    container = pod["containers"][0]
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] == 51
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    mounted = {m["mountPath"] for m in container["volumeMounts"]}
    assert mounted == {"/etc/paceline", "/dev/shm", "/tmp", "/runs"}


@pytest.mark.parametrize(
    ("kind", "host"),
    [
        ("job", "gpt-1-0.gpt-1"),
        ("jobset", "gpt-1-node-0-0.gpt-1"),
        ("trainjob", "gpt-1-node-0-0.gpt-1"),
        ("pytorchjob", "gpt-1-master-0"),
    ],
)
def test_one_launcher_in_each_pod_meets_the_others_at_pod_0(kind, host):
    found = documents_of(job_of({**NEEDED, "kind": kind}))
    command = pod_of(found)["containers"][0]["command"]
    launcher = command[command.index("python") :]
    assert launcher[:5] == ["python", "-m", "paceline", "train", "/etc/paceline/config.yaml"]
    assert launcher[5:] == [
        *("--on", "local", "--run-dir", "/runs/gpt-1", "--resume", "auto"),
        *("--rdzv", f"{host}:29400", "--nnodes", "2"),
    ]
    assert "sh" not in command


def test_the_config_is_that_of_a_launcher_of_the_pods(tmp_path):
    job = job_of({**NEEDED, "secret": "s"}, secret="file:/home/me/secret", grace=33.0)
    text = documents_of(job)["ConfigMap"]["data"]["config.yaml"]
    (tmp_path / "config.yaml").write_text(text)
    config = load(tmp_path / "config.yaml")
    assert (config.launch.on, config.launch.rdzv, config.launch.secret) == ("local", None, None)
    assert config.launch.grace == 33.0
    assert config.model == job.config.model


def test_one_machine_needs_no_rendezvous():
    found = documents_of(job_of(nnodes=1))
    assert "Service" not in found
    assert "--rdzv" not in pod_of(found)["containers"][0]["command"]


def test_a_script_travels_in_the_config_map(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    job = job_of(train=("--script", str(script), "--nproc", "2"), script=("--lr", "$(HOME)"))
    found = documents_of(job)
    assert found["ConfigMap"]["data"] == {"script.py": "print('hello')\n"}
    command = pod_of(found)["containers"][0]["command"]
    assert command[4:8] == ["--script", "/etc/paceline/script.py", "--nproc", "2"]
    assert command[-3:] == ["--", "--lr", "$$(HOME)"]


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_a_preempted_pod_has_not_failed_and_what_would_recur_is_not_tried_again(kind):
    spec = job_spec_of(documents_of(job_of({**NEEDED, "kind": kind}, nnodes="2:4")))
    preempted, told, recurs = spec["podFailurePolicy"]["rules"]
    assert preempted["action"] == "Ignore"
    assert preempted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert (told["action"], told["onExitCodes"]["values"]) == ("Ignore", [143])
    assert (recurs["action"], recurs["onExitCodes"]["values"]) == ("FailJob", [78])
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 2}]}


def test_a_launcher_under_a_scheduler_says_that_a_failure_would_recur(monkeypatch):
    from paceline.cli.screen import exit_status

    error = RankFailed("x", rank=0, exit_code=1, would_recur=True)
    assert exit_status(error) == 1
    monkeypatch.setenv(exit_codes.SCHEDULED, "1")
    assert exit_status(error) == exit_codes.WOULD_RECUR
    assert exit_status(RankFailed("x", rank=0, exit_code=-9)) == 137
    pod = pod_of(documents_of(job_of()))
    assert {"name": exit_codes.SCHEDULED, "value": "1"} in pod["containers"][0]["env"]


def test_the_secret_of_the_run_comes_from_a_secret_of_the_cluster():
    job = job_of({**NEEDED, "secret": "gpt-secret", "namespace": "team"})
    variables = {v["name"]: v for v in pod_of(documents_of(job))["containers"][0]["env"]}
    assert variables["PACELINE_SECRET"]["valueFrom"] == {
        "secretKeyRef": {"name": "gpt-secret", "key": "secret"}
    }
    make = "kubectl --namespace=team create secret generic gpt-secret --from-file=secret=secret.txt"
    assert make in KubernetesEngine().plan(job)
    assert "without a secret" in KubernetesEngine().plan(job_of())
    assert KubernetesEngine().plan(job_of(nnodes=1)).startswith("---")


def test_what_a_pod_would_lack_is_said_before_anything_is_started():
    config = job_of({"kind": "trainjob", "keep": 1}, secret="file:/s", rdzv="h:1").config
    problems = KubernetesEngine().problems(config)
    starts = [problem.split(" ")[0].split("=")[0].rstrip(":") for problem in problems]
    assert starts == [
        *("launch.kubernetes.image", "launch.kubernetes.claim", "launch.secret", "launch.rdzv"),
        "launch.kubernetes.keep",
    ]
    assert KubernetesEngine().problems(job_of().config) == []
    assert KubernetesEngine().gpus_per_machine(job_of({**NEEDED, "gpus": 8}).config) == 8


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("image", "a b"), ("image", "--x"), ("claim", "Runs"), ("namespace", "a_b")),
        *(("node_selector", {"a b": "c"}), ("labels", {"a": "b c"}), ("memory", "64 GB")),
        *(("runs", "/a/../b"), ("runs", "runs"), ("claims", {"/etc/x": "c"}), ("uid", 0)),
        *(("secret_env", {"A-B": "s/k"}), ("secret_env", {"AB": "s"}), ("name", "1a")),
        *(("name", "a" * 41), ("capabilities", ["sys_admin"]), ("port", 80), ("kind", "pod")),
    ],
)
def test_values_that_kubernetes_would_refuse_are_refused_first(key, value):
    with pytest.raises(ConfigError, match=f"launch.kubernetes.{key}"):
        load({"launch": {"kubernetes": {key: value}}})


def test_names_of_runs_become_names_of_the_cluster():
    def named(folder: str) -> str:
        return cluster_name(job_of(run=f"/runs/{folder}"))

    assert named("gpt-20260101-101010") == "gpt-20260101-101010"
    assert cluster_name(job_of({**NEEDED, "name": "mine"})) == "mine"
    changed = [named(f) for f in ("GPT", "gpt_", "1", "a" * 80, "日本", "-", "a.b", "../x y")]
    assert len(set(changed)) == len(changed)
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{,38}[a-z0-9])", name) for name in changed), changed


# kubectl, a stand-in for which writes down what it is asked.

_KUBECTL = """#!{python}
import json, os, sys
stdin = "" if sys.stdin.isatty() else sys.stdin.read()
with open({log!r}, "a") as log:
    log.write(json.dumps([sys.argv[1:], stdin]) + chr(10))
print(open({answer!r}).read())
sys.exit(int(os.environ.get("KUBECTL_STATUS", "0")))
"""


class Stand:
    """A kubectl that is not one."""

    def __init__(self, folder: Path) -> None:
        self.log, self.answer = folder / "log", folder / "answer"
        self.answer.write_text("")
        (folder / "bin").mkdir()
        file = folder / "bin" / "kubectl"
        file.write_text(
            _KUBECTL.format(python=sys.executable, log=str(self.log), answer=str(self.answer))
        )
        file.chmod(0o755)

    @property
    def asked(self) -> list[list]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    stand = Stand(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return stand


def test_a_run_is_handed_over_asked_for_shown_and_ended(kubectl, tmp_path, capfd, monkeypatch):
    engine = KubernetesEngine()
    run = tmp_path / "runs" / "gpt-1"
    job = job_of({**NEEDED, "context": "c", "namespace": "n"}, run=str(run), apply=True)
    kubectl.answer.write_text("job.batch/gpt-1 created")
    assert engine.start(job) == 0
    [[words, stdin]] = kubectl.asked
    assert words == ["--context=c", "--namespace=n", "apply", "-f", "-"]
    assert stdin == manifest(job) == (run / "submission" / "manifest.yaml").read_text()
    record = read_submission(run)
    assert (record.engine, record.job) == ("kubernetes", "gpt-1")

    condition = {"type": "Complete", "status": "True", "message": "all\x1b[31m done"}
    kubectl.answer.write_text(json.dumps({"status": {"succeeded": 2, "conditions": [condition]}}))
    said = engine.status(record)
    assert said == "job.batch/gpt-1 Complete, 2 succeeded: all\\x1b[31m done"
    kubectl.answer.write_text("{}")
    assert engine.status(record) == "job.batch/gpt-1 has no status yet"
    kubectl.answer.write_text("")
    assert "not applied yet" in engine.status(record)

    kubectl.answer.write_text("[pod/gpt-1-0] step 1")
    assert engine.logs(record, follow=True) == 0
    assert kubectl.asked[-1][0][2:] == [
        *("logs", "-l", "paceline/run=gpt-1", "--prefix", "--tail=-1", "--max-log-requests", "2"),
        "--follow",
    ]
    assert "step 1" in capfd.readouterr().out
    assert "/runs/gpt-1" in engine.cancel(record)
    deleted = [words[2:] for words, _ in kubectl.asked[-2:]]
    assert deleted[0][:2] == ["delete", "job.batch/gpt-1"]
    assert deleted[1][:4] == ["delete", "configmap,service", "-l", "paceline/run=gpt-1"]
    monkeypatch.setenv("KUBECTL_STATUS", "3")
    with pytest.raises(LaunchError, match="failed with status 3"):
        engine.status(record)


def test_without_apply_nothing_is_handed_over(kubectl, tmp_path, capsys):
    run = tmp_path / "gpt-1"
    KubernetesEngine().start(job_of(run=str(run)))
    assert not kubectl.log.exists()
    assert f"kubectl apply -f {run}/submission/manifest.yaml" in capsys.readouterr().out
    assert read_submission(run) is not None


def test_without_kubectl_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no kubectl on PATH"):
        KubernetesEngine().start(job_of(run=str(tmp_path / "gpt-1"), apply=True))
    assert not (tmp_path / "gpt-1").exists()
