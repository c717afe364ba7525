"""Every launcher's real variables, as captured from real runs: what is read, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.train_nodes import refuse_copies
from paceline.config import load, resolve
from paceline.errors import ConfigError, WorldError
from paceline.launch.allocation import check_not_left_alone, started_by_tasks
from paceline.launch.environment import read_environment
from paceline.launch.launchers import LAUNCHERS
from paceline.launch.master_address import slurm_port
from paceline.launch.slurm_nodes import expand_counts, expand_hosts
from paceline.world.joining import RankPlace, nodes_of

# Open MPI 4.1.4: mpirun -np 2, rank 1.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "2075590657",
    "OMPI_MCA_orte_num_nodes": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "2075590657",
    "PMIX_RANK": "1",
}
# The same with --host a:2,b:1 -np 3, rank 2.
OPEN_MPI_HOSTS = OPEN_MPI | {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_MCA_orte_num_nodes": "2",
    "PMIX_RANK": "2",
}
# MPICH 4.0.2, Hydra: mpirun -np 2, rank 1; and -hosts a:2,b:2 -np 4, rank 3.
HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "vm",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
HYDRA_HOSTS = HYDRA | {"PMI_RANK": "3", "PMI_SIZE": "4"}
# SLURM 22.05: srun -N2 -n3, task 2; what a batch script of the same job has; a shell of salloc.
SLURM = {
    "SLURM_JOBID": "1",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "gpu-a[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "gpu-a[01-02]",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu-a[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_TASK_PID": "7501",
    "SLURMD_NODENAME": "gpu-a02",
}
BATCH = {
    name: value
    for name, value in (SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).items()
    if "STEP" not in name
}
SALLOC = {
    n: v for n, v in BATCH.items() if n not in ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
}
PMI2 = SLURM | {"PMI_FD": "13", "PMI_RANK": "2", "PMI_SIZE": "3", "PMI_JOBID": "1.0"}
# Ray 2's TorchTrainer, Kubeflow's PyTorchJob and a Kubernetes Indexed Job set these.
RAY = {
    "RAY_RAYLET_PID": "12",
    "RAY_JOB_ID": "01000000",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "41234",
}
KUBEFLOW = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2"}
MEETING = {"MASTER_ADDR": "job-0.job", "MASTER_PORT": "29500"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
PACELINE = TORCHRUN | {"PACELINE_LAUNCHER_PID": "77"}

# variables; launcher, rank, size, local rank, local size, node, nodes, address, port
READ = {
    "paceline": (PACELINE, ("paceline", 5, 8, 1, 4, 1, 2, "node0", 29400)),
    "torchrun": (TORCHRUN, ("torchrun", 5, 8, 1, 4, 1, 2, "node0", 29400)),
    "paceline inside srun": (SLURM | PACELINE, ("paceline", 5, 8, 1, 4, 1, 2, "node0", 29400)),
    "torchrun inside mpirun": (OPEN_MPI | TORCHRUN, ("torchrun", 5, 8, 1, 4, 1, 2, "node0", 29400)),
    "open mpi": (OPEN_MPI, ("Open MPI", 1, 2, 1, 2, 0, 1, "127.0.0.1", 21459)),
    "open mpi of one": (
        OPEN_MPI
        | {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        ("Open MPI", 0, 1, 0, 1, 0, 1, None, None),
    ),
    "open mpi with WORLD_SIZE as it is": (
        OPEN_MPI | {"WORLD_SIZE": "2", "RANK": "1"},
        ("Open MPI", 1, 2, 1, 2, 0, 1, "127.0.0.1", 21459),
    ),
    "open mpi, hosts, exported": (
        OPEN_MPI_HOSTS | {"MASTER_ADDR": "a", "MASTER_PORT": "29500"},
        ("Open MPI", 2, 3, 0, 1, 2, 3, "a", 29500),
    ),
    "open mpi, hosts, address alone": (
        OPEN_MPI_HOSTS | {"MASTER_ADDR": "a"},
        ("Open MPI", 2, 3, 0, 1, 2, 3, "a", 21459),
    ),
    "open mpi started by SLURM's daemons": (
        SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"} | OPEN_MPI,
        ("Open MPI", 1, 2, 1, 2, 0, 1, "127.0.0.1", 21459),
    ),
    "hydra, port exported": (
        HYDRA | {"MASTER_PORT": "29511"},
        ("MPICH (Hydra)", 1, 2, 1, 2, 0, 1, "127.0.0.1", 29511),
    ),
    "hydra in a SLURM job": (
        BATCH | HYDRA | {"MASTER_PORT": "29511"},
        ("MPICH (Hydra)", 1, 2, 1, 2, 0, 1, "127.0.0.1", 29511),
    ),
    "srun": (SLURM, ("SLURM (srun)", 2, 3, 0, 1, 1, 2, "gpu-a01", 20064)),
    "srun --mpi=pmi2": (PMI2, ("SLURM (srun)", 2, 3, 0, 1, 1, 2, "gpu-a01", 20064)),
    "srun --mpi=pmix": (
        SLURM | {"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.1.0"},
        ("SLURM (srun)", 2, 3, 0, 1, 1, 2, "gpu-a01", 20064),
    ),
    "srun -n2 of a job of three, the rest of it kept": (
        SLURM
        | {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
        | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "gpu-a02"}
        | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"},
        ("SLURM (srun)", 1, 2, 1, 2, 0, 1, "127.0.0.1", 20067),
    ),
    "srun with its own MASTER_ADDR": (
        SLURM | {"MASTER_ADDR": "gpu-a01-ib", "MASTER_PORT": "12345"},
        ("SLURM (srun)", 2, 3, 0, 1, 1, 2, "gpu-a01-ib", 12345),
    ),
    "srun with torch's variables made of SLURM's": (
        SLURM | {"RANK": "2", "WORLD_SIZE": "3"},
        ("SLURM (srun)", 2, 3, 0, 1, 1, 2, "gpu-a01", 20064),
    ),
    "a task that starts ranks itself": (
        SLURM | MEETING | {"RANK": "9", "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "4"},
        ("RANK and WORLD_SIZE", 9, 12, 1, 4, 2, 3, "job-0.job", 29500),
    ),
    "a batch script that sets them itself": (
        BATCH | {"RANK": "0", "WORLD_SIZE": "1"},
        ("RANK and WORLD_SIZE", 0, 1, 0, 1, 0, 1, None, None),
    ),
    "pmi with its local size": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
        | {"PMI_JOBID": "x"},
        ("PMI", 1, 2, 1, 2, 0, 1, "127.0.0.1", 23923),
    ),
    "pmix with WORLD_SIZE": (
        {"PMIX_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
        ("PMIx", 1, 2, 1, 2, 0, 1, "127.0.0.1", 9),
    ),
    "ray": (RAY, ("Ray Train", 3, 4, 1, 2, 1, 2, "10.0.0.1", 41234)),
    "ray started by srun": (SLURM | RAY, ("Ray Train", 3, 4, 1, 2, 1, 2, "10.0.0.1", 41234)),
    "kubeflow": (KUBEFLOW, ("Kubeflow PyTorchJob", 2, 3, 0, 1, 2, 3, "job-master-0", 23456)),
    "indexed job": (
        KUBERNETES | MEETING | {"WORLD_SIZE": "3"},
        ("Kubernetes indexed job", 2, 3, 0, 1, 2, 3, "job-0.job", 29500),
    ),
    "paceline in an indexed job": (
        KUBERNETES | PACELINE,
        ("paceline", 5, 8, 1, 4, 1, 2, "node0", 29400),
    ),
    "mpirun in a pod": (KUBERNETES | OPEN_MPI, ("Open MPI", 1, 2, 1, 2, 0, 1, "127.0.0.1", 21459)),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_read_of_each_launcher(case):
    environ, expected = READ[case]
    env = read_environment(environ)
    assert env is not None
    found = (env.launcher, env.rank, env.size, env.local_rank, env.local_size)
    assert (*found, env.node, env.nodes, env.address, env.port) == expected
    assert env.variables
    assert set(env.variables) <= set(environ)


def test_a_store_is_hosted_by_torchs_launchers_alone():
    assert read_environment(PACELINE).store_is_hosted
    assert not read_environment(SLURM).store_is_hosted


def test_a_requeued_slurm_job_is_a_restart():
    assert read_environment(SLURM | {"SLURM_RESTART_COUNT": "2"}).restart_count == 2


def test_tasks_with_gpus_of_their_own_are_known():
    assert not read_environment(SLURM).has_own_gpus
    assert read_environment(SLURM | {"SLURM_GPUS_PER_TASK": "1"}).has_own_gpus


# variables, and how the error begins or what it holds
REFUSED = {
    "WORLD_SIZE from outside": (
        OPEN_MPI | {"WORLD_SIZE": "4"},
        "WORLD_SIZE=4, but OMPI_COMM_WORLD_SIZE=2 by Open MPI, which started this process: they "
        "contradict each other. Unset WORLD_SIZE",
    ),
    "RANK from outside": (
        SLURM | {"RANK": "0", "WORLD_SIZE": "3"},
        "RANK=0, but SLURM_PROCID=2 by SLURM (srun)",
    ),
    "a world of one from outside": (
        SLURM | {"RANK": "0", "WORLD_SIZE": "1"},
        "WORLD_SIZE=1, but SLURM_STEP_NUM_TASKS=3",
    ),
    "ranks of another task": (
        SLURM | MEETING | {"RANK": "3", "WORLD_SIZE": "12"},
        "WORLD_SIZE=12, but SLURM_STEP_NUM_TASKS=3",
    ),
    "two MPIs": (OPEN_MPI | {"PMIX_RANK": "0"}, "OMPI_COMM_WORLD_RANK=1, but PMIX_RANK=0 by PMIx"),
    "srun and another PMI": (PMI2 | {"PMI_SIZE": "4"}, "SLURM_STEP_NUM_TASKS=3, but PMI_SIZE=4"),
    "open mpi without a size": (
        {n: v for n, v in OPEN_MPI.items() if n != "OMPI_COMM_WORLD_SIZE"},
        "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_LOCAL_RANK=1 is set by Open MPI but "
        "OMPI_COMM_WORLD_SIZE is not. Start the script with `mpirun",
    ),
    "open mpi on several hosts": (
        OPEN_MPI_HOSTS,
        "Open MPI started ranks on several hosts, and MASTER_ADDR is not set: none of its "
        "variables says which host rank 0 is on. Export it for all ranks: mpirun -x "
        "MASTER_ADDR=host1 -x MASTER_PORT=29500",
    ),
    "hydra on several hosts": (
        HYDRA_HOSTS,
        "MPICH (Hydra) started ranks on several hosts, and MASTER_ADDR is not set: none of its "
        "variables says which host rank 0 is on. Export it for all ranks: mpirun -genv "
        "MASTER_ADDR host1 -genv MASTER_PORT 29500",
    ),
    "hydra without its proxy": (HYDRA, "MPICH (Hydra) started this rank, MASTER_PORT is not set"),
    "hydra without a local size": (
        {n: v for n, v in HYDRA.items() if n != "MPI_LOCALNRANKS"},
        "MPICH (Hydra) started 2 ranks, but how many of them run on this machine is unknown: "
        "MPI_LOCALNRANKS and LOCAL_WORLD_SIZE is not set.",
    ),
    "a step without a rank": (
        {n: v for n, v in SLURM.items() if n != "SLURM_PROCID"},
        "SLURM_STEP_NUM_TASKS=3, SLURM_LOCALID=0 is set by SLURM (srun) but SLURM_PROCID is not.",
    ),
    "tasks that do not add up": (
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        "SLURM_STEP_TASKS_PER_NODE=2(x2) is 4 tasks, but SLURM_STEP_NUM_TASKS=3: they contradict",
    ),
    "a node too many": (
        SLURM | {"SLURM_NODEID": "2"},
        "SLURM_NODEID=2, but SLURM_STEP_TASKS_PER_NODE=2,1 is 2 nodes",
    ),
    "a list of tasks that is none": (
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2x3"},
        "'2x3' is no list of tasks per node",
    ),
    "a node list that is none": (
        SLURM | {"SLURM_STEP_NODELIST": "gpu[1-"},
        "'gpu[1-' is no list of hosts: its brackets do not match",
    ),
    "task 0 on another node": (
        SLURM | {"SLURM_PROCID": "0"},
        "SLURM_STEP_NODELIST=gpu-a[01-02] begins with gpu-a01, but the tasks were distributed",
    ),
    "srun -m arbitrary": (
        SLURM | {"SLURM_DISTRIBUTION": "arbitrary"},
        "SLURM_STEP_NODELIST=gpu-a[01-02] begins with gpu-a01, but the tasks were distributed",
    ),
    "srun, no number": (SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a whole number."),
    "srun, rank too high": (SLURM | {"SLURM_PROCID": "3"}, "SLURM_PROCID=3 with SLURM_STEP_NUM"),
    "pmix alone": (
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"},
        "PMIX_RANK=1 is set by PMIx but WORLD_SIZE is not. PMIx has no variable for the number",
    ),
    "an indexed job alone": (
        KUBERNETES,
        "JOB_COMPLETION_INDEX=2 is set by Kubernetes indexed job but WORLD_SIZE is not. Set "
        "WORLD_SIZE to the number of pods",
    ),
    "an indexed job without an address": (
        KUBERNETES | {"WORLD_SIZE": "3"},
        "Kubernetes indexed job started ranks on several hosts, and MASTER_ADDR is not set",
    ),
    "an index beyond the size": (
        KUBERNETES | MEETING | {"WORLD_SIZE": "2"},
        "JOB_COMPLETION_INDEX=2 with WORLD_SIZE=2",
    ),
    "kubeflow with several ranks in a pod": (
        KUBEFLOW | {"WORLD_SIZE": "6"},
        "LOCAL_WORLD_SIZE is not set, and MASTER_ADDR=job-master-0 is another machine's",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_gaps_and_contradictions_are_errors_never_a_world_of_one(case):
    environ, message = REFUSED[case]
    with pytest.raises(WorldError) as caught:
        read_environment(environ)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("marked", [BATCH, SALLOC, SLURM | {"SLURM_STEP_ID": "4294967290"}])
def test_a_shell_of_a_slurm_job_is_no_rank_and_does_not_train_alone(marked):
    assert read_environment(marked) is None
    with pytest.raises(WorldError) as caught:
        check_not_left_alone(marked)
    assert str(caught.value).startswith("SLURM job 1 is to have 3 tasks, and this process is none")
    assert "srun " in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH | {"SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "8"},
        {"SLURM_JOB_ID": "1"},
    ],
)
def test_a_shell_of_a_job_of_one_task_trains_alone(environ):
    assert read_environment(environ) is None
    check_not_left_alone(environ)


def test_two_nodes_without_a_number_of_tasks_are_two_tasks():
    environ = {n: v for n, v in BATCH.items() if n != "SLURM_NTASKS"}
    with pytest.raises(WorldError, match="is to have 2 tasks"):
        check_not_left_alone(environ)


def test_launchers_know_that_they_were_started_several_times():
    assert started_by_tasks(SLURM) == ("SLURM (srun)", 3)
    assert started_by_tasks(OPEN_MPI) == ("Open MPI", 2)
    assert started_by_tasks(BATCH | HYDRA) == ("MPICH (Hydra)", 2)
    for environ in ({}, BATCH, SLURM | PACELINE, KUBERNETES, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}):
        assert started_by_tasks(environ) is None


HOSTS = {
    "gpu1": ["gpu1"],
    "gpu[01-03,7],login-a[1-2]-x": ["gpu01", "gpu02", "gpu03", "gpu7", "login-a1-x", "login-a2-x"],
    "r[1-2]n[08-10]": ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"],
    "a,b-c, d": ["a", "b-c", "d"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[1,3-4].cluster.example": ["n1.cluster.example", "n3.cluster.example", "n4.cluster.example"],
    "x[5]": ["x5"],
}


@pytest.mark.parametrize("text", HOSTS)
def test_host_lists_of_slurm(text):
    assert expand_hosts(text) == HOSTS[text]


@pytest.mark.parametrize(
    "text", ["", ",", "a[", "a]", "a[1", "a[[1]]", "a[x]", "a[3-1]", "a[1-2-3]", "a[0-99999999]"]
)
def test_what_is_no_host_list_is_refused(text):
    with pytest.raises(WorldError, match="is no list of hosts"):
        expand_hosts(text)


@given(st.text(alphabet="ab01-,[]x ", max_size=30))
def test_any_text_is_a_list_of_hosts_or_refused(text):
    try:
        hosts = expand_hosts(text)
    except WorldError:
        return
    assert hosts
    assert not any(c in host for host in hosts for c in "[],")


def test_counts_of_slurm():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]


def test_ports_of_steps_and_of_neighbouring_jobs_differ():
    ports = {slurm_port(job, step) for job in range(4711, 4711 + 150) for step in range(64)}
    assert len(ports) == 150 * 64
    assert min(ports) >= 20000
    assert max(ports) < 30000


def places(*local: tuple[int, int, str]) -> list[RankPlace]:
    return [RankPlace(*one) for one in local]


def test_nodes_are_found_by_comparing_ranks():
    in_order = places((0, 2, "vm"), (1, 2, "vm"), (0, 1, "vm"), (0, 1, "b"))
    assert nodes_of(in_order) == [0, 0, 1, 2]
    in_turn = places((0, 2, "a"), (0, 2, "b"), (1, 2, "a"), (1, 2, "b"))
    assert nodes_of(in_turn) == [0, 1, 0, 1]
    with pytest.raises(WorldError, match="4 of 4 ranks run on a host called vm"):
        nodes_of([place._replace(host="vm") for place in in_turn])


def test_the_table_has_each_name_once():
    assert len({launcher.name for launcher in LAUNCHERS}) == len(LAUNCHERS)
    assert all(launcher.marks for launcher in LAUNCHERS)


def test_paceline_train_is_not_started_by_every_task(monkeypatch):
    config = resolve(load(None))
    refuse_copies(config)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"started paceline train 3 times, and each would start"):
        refuse_copies(config)
    with pytest.raises(ConfigError, match=r"3 times, but launch.nnodes=2: one on each machine"):
        refuse_copies(resolve(load(None, ["launch.nnodes=2", "launch.rdzv=gpu-a01:29400"])))
    refuse_copies(resolve(load(None, ["launch.nnodes=3", "launch.rdzv=gpu-a01:29400"])))
