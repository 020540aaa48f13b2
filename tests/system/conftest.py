"""Fixtures of the system tests, and the table of those tests that `make test` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.cluster.fixtures import SHARES_FILES
from elastic_jobs import Watched, wait_for_step
from places import EVERYWHERE, Place

FOLDER = Path(__file__).parent
SHOWN_BY = {
    "the value, the exception, the barrier, the end of a gang": [
        "test_promises.py",
        "test_promises_of_life.py",
    ],
    "no survivor waits, nothing is left": [
        "test_deaths.py::test_killing_an_agent_or_a_worker",
        "test_deaths.py::test_killing_the_caller[local-starting]",
        "test_deaths.py::test_killing_the_caller[local-joining]",
        "test_deaths.py::test_killing_the_caller[local-running]",
        "test_deaths.py::test_killing_the_caller[local-reporting]",
        "test_deaths.py::test_killing_the_caller[kubernetes-running]",
        "test_orphans.py::test_a_retry_does_not_meet_what_a_killed_agent_has_left",
        "test_still_hosts.py::test_the_output_says_which_host_holds_the_others_up",
    ],
    "bad input fails here": ["test_bad_input.py::test_faults_of_a_program_create_nothing"],
    "attempts": ["test_attempts.py::test_a_retry_leaves_everything_of_the_attempts_before"],
    "sessions": [
        "test_sessions.py::test_each_call_is_a_job_of_its_own_in_new_processes",
        "test_sessions.py::test_kept_calls_share_a_process_until_it_dies",
        "test_sessions.py::test_the_world_of_jax_stays_until_a_host_of_it_dies",
        "test_sessions.py::test_a_script_on_a_named_session_traces_once_and_imports_changes",
        "test_sessions.py::test_calls_wait_in_order_and_can_be_cancelled",
        "test_sessions.py::test_a_session_with_calls_is_stopped_only_by_force",
        "test_sessions.py::test_a_host_that_dies_is_replaced",
        "test_sessions.py::test_the_death_of_the_leader_ends_the_calls_and_the_session",
    ],
    "preemption": [
        "test_preemption.py::test_all_hosts_save_and_another_attempt_follows_that_does_not_count"
    ],
    "elastic": [
        "test_elastic.py::test_it_shrinks_at_once_also_without_the_first_slice",
        "test_elastic.py::test_it_grows_back_at_a_step_and_repeats_none",
        "test_elastic_controller.py::test_it_shrinks_and_grows_back_at_a_step",
    ],
    "multi-slice, one controller": [
        "test_multislice.py::test_hosts_and_devices_know_their_slice",
        "test_single_controller.py::test_one_process_has_the_devices_of_all_hosts",
    ],
    "joining JAX": [
        "test_joining.py::test_initialize_needs_no_arguments_in_a_function",
        "test_joining.py::test_initialize_needs_no_arguments_in_a_program",
    ],
    "checkpoints": [
        "test_checkpointer.py::test_a_host_that_was_killed_goes_on_from_memory",
        "test_checkpointer.py::test_without_local_copies_it_goes_on_from_the_folder",
    ],
    "metrics": [
        "test_metrics_jobs.py::test_what_a_killed_host_has_logged_is_there_and_steps_trained_again_show_once",
        "test_metrics_jobs.py::test_commands_show_what_was_logged",
    ],
    "what ships": [
        "test_one_copy.py::test_classes_errors_enums_and_caches_of_modules_are_one",
        "test_registrations.py::test_what_scripts_and_modules_register_with_jax_flax_and_keras_is_registered",
        "test_data_jobs.py::test_a_function_gets_plain_paths_wherever_data_was",
        "test_editable.py::test_an_edit_after_the_submission_does_not_reach_the_job",
        "test_secrets.py",
    ],
    "calls without waiting, batches": [
        "test_async_jobs.py::test_jobs_of_calls_and_of_batches_as_they_end",
        "test_batches.py::test_values_of_many_inputs",
        "test_batches.py::test_the_submitting_process_is_killed",
    ],
    "the command line": [
        "test_cli_run.py::test_a_script_runs_as_if_it_ran_here",
        "test_cli_run.py::test_a_module_and_its_arguments",
        "test_completion.py",
    ],
    "notebooks": ["test_notebooks.py::test_output_arrives_while_the_cell_runs"],
    "the dashboard": ["test_dashboard_browser.py::test_a_training_is_watched_live_to_its_end"],
    "the debugger": ["test_debugging.py::test_an_editor_stops_the_function_looks_and_changes_it"],
    "the compiler": [
        "test_compile_check.py::test_a_run_is_checked_by_the_compiler_of_the_real_slice"
    ],
    "Kubernetes": [
        "test_kubernetes.py::test_several_hosts_are_a_jobset",
        "test_kubernetes.py::test_a_lost_pod_is_retried_with_the_whole_gang[leader]",
        "test_cluster_elastic.py::test_a_lost_pod_is_replaced_and_all_others_stay",
        "test_cluster_pathways.py::test_one_process_has_the_devices_of_all_machines",
        "test_cluster_rights.py::test_the_documented_rights_are_enough",
        "test_bootstrap.py::test_the_real_package_runs_where_its_requirements_are_met",
        "test_bucket_store.py::test_what_a_killed_host_had_printed_is_there",
    ],
    "Ray": ["test_ray.py::test_a_gang_of_four_has_a_loss_trains_and_fails"],
    "scripts of keras-kinetic": ["test_compat_scripts.py::test_a_script_runs_as_it_is"],
    "documentation, examples": [
        "test_docs.py",
        "test_docstrings.py",
        "test_examples.py::test_hello",
        "test_examples.py::test_every_example_is_tested",
    ],
}
"""For each promise and each way to use kinetic, the tests of this folder that `make test` runs:
files, tests with all their parameters, or tests with one. All others are marked `long`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder that `SHOWN_BY` does not name as `long`."""
    short = {name for names in SHOWN_BY.values() for name in names}
    for item in items:
        if item.path.parent == FOLDER:
            test = getattr(item, "originalname", item.name)
            if short.isdisjoint(
                (item.path.name, *(f"{item.path.name}::{name}" for name in (test, item.name)))
            ):
                item.add_marker("long")


@pytest.fixture(params=EVERYWHERE)
def place(request, home, monkeypatch):
    """The place where the test's jobs run: the test runs once for each place."""
    folder = home.parent / "shared"
    if request.param != "kubernetes":
        monkeypatch.setenv("KINETIC_BACKEND", request.param)
        return Place(request.param, folder)
    if request.node.get_closest_marker("shares_files") and not SHARES_FILES:
        pytest.skip("needs pods that share files with this machine, as its own processes do")
    return Place(request.param, folder, request.getfixturevalue("on_cluster"))


@pytest.fixture
def begin(home, tmp_path):
    """A function that starts an elastic job and returns it; with `wait`, after host 0's second
    step."""

    def begin(remote, *args, wait=False, **more):
        handle = remote.run_async(str(tmp_path), *args, **more)
        if wait:
            wait_for_step(tmp_path, 1, 0)
        return Watched(home, handle)

    return begin
