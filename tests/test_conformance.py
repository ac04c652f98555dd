"""The conformance suite catches backends that are wrong: each planted fault fails named checks.

`python tests/test_conformance.py` prints the table of docs/write-a-backend.md.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import faulty_backends as faulty
from pdkv.backends.loopback import LoopbackFabric
from pdkv.backends.loopback_shared import SharedLoopbackBackend
from pdkv.interfaces import BackendLimits, TransferBackend
from pdkv.testing.conformance import BackendConformance, checks, failures

DOCS = Path(__file__).parent.parent / "docs" / "write-a-backend.md"
BEGIN, END = "<!-- planted faults -->\n", "<!-- end of planted faults -->\n"

FAULTS: dict[str, list[type]] = {
    "test_calls_return_what_the_interface_says": [
        faulty.Nameless,
        faulty.ClaimsReads,
        faulty.PollsNothing,
        faulty.MetadataIsText,
    ],
    "test_random_runs_land_where_they_should_and_nowhere_else": [
        faulty.WrongLength,
        faulty.RoundedLength,
    ],
    "test_every_byte_of_random_plans_is_right": [faulty.ForgetsTheLastRun],
    "test_two_readers_get_only_their_own": [faulty.OneReader],
    "test_completion_comes_once_and_says_what_it_claims": [
        faulty.CompletesTwice,
        faulty.NeverSaysDone,
    ],
    "test_notification_comes_once_and_never_before_its_data": [
        faulty.EarlyNotification,
        faulty.LostNotification,
        faulty.DoubleNotification,
    ],
    "test_notifications_are_bytes_of_any_value": [faulty.TextNotifications],
    "test_empty_notification_is_none": [faulty.RepeatsEmptyNotification],
    "test_no_runs_complete_and_deliver_their_notification": [faulty.SkipsEmptyPosts],
    "test_each_of_many_in_flight_is_told_once_after_its_own_data": [
        faulty.OneNotificationForMany,
        faulty.EarlyNotification,
    ],
    "test_runs_outside_the_writers_memory_are_refused_whole": [faulty.PastTheEnd],
    "test_runs_outside_the_readers_memory_are_refused_whole": [faulty.PartOfARefusedPost],
    "test_malformed_runs_are_refused": [faulty.TrustsRunShapes],
    "test_more_than_the_limits_of_a_post_is_refused": [faulty.NoLimits],
    "test_a_run_over_two_adjacent_regions_is_refused": [faulty.JoinsRegions],
    "test_memory_is_registered_once": [faulty.RegistersTwice],
    "test_a_failed_register_leaves_the_rest_usable": [faulty.RegistersAPart],
    "test_deregistered_memory_is_not_written_from": [faulty.DeregistersNothing],
    "test_foreign_metadata_is_refused": [faulty.TakesAnyMetadata],
    "test_connecting_again_changes_nothing": [faulty.NewPeerEachTime],
    "test_a_peer_is_unknown_before_connect_and_after_disconnect": [faulty.NeverForgets],
    "test_a_peer_that_is_gone_is_an_error_of_its_own_transfers_only": [faulty.SwallowedError],
    "test_a_full_queue_says_try_later_and_loses_nothing": [faulty.SilentlyFull],
    "test_many_transfers_leave_nothing_behind": [faulty.ReusesIds, faulty.LeavesFilesOpen],
    "test_close_is_idempotent_and_final": [faulty.ClosesHalf],
    "test_close_with_writes_in_flight_returns": [faulty.ClosesOnlyWhenIdle],
    "test_fence_means_that_nothing_lands_any_more": [faulty.LyingFence],
    "test_transport_is_a_word": [faulty.NoTransport],
    "test_prepared_descriptors_land_where_their_indices_say": [faulty.IgnoresStride],
    "test_prepared_posts_outside_their_lists_are_refused": [faulty.CutsIndices],
    "test_lists_released_in_flight_finish_their_transfers": [faulty.ReleaseDrops],
    "test_reads_bring_exactly_what_was_asked_for": [faulty.ReadsOneByteLess],
    "test_reads_outside_registered_memory_are_refused": [faulty.ReadsAnywhere],
    "test_two_backends_work_in_two_threads": [faulty.OneThreadOnly],
    "test_memory_and_files_stay_flat": [faulty.KeepsEverything, faulty.LostNotification],
    "test_throughput_is_near_that_of_the_bare_engine": [faulty.CopiesThrice],
    "test_another_process_sees_every_byte_before_its_notification": [faulty.ToldEarlyToAnother],
    "test_what_a_killed_writer_told_is_true": [faulty.ToldEarlyToAnother],
    "test_a_peer_killed_before_a_transfer_is_its_error": [faulty.DeathIsSuccess],
    "test_a_peer_killed_during_a_transfer_ends_it_and_no_other": [faulty.DeathIsSuccess],
    "test_a_peer_killed_after_a_transfer_changes_nothing_that_was_told": [faulty.TellsAgain],
    "test_a_process_that_starts_again_is_another_peer": [faulty.PeerIsItsName],
    "test_a_stopped_peer_holds_up_no_call": [faulty.WaitsForTheReader],
}
PAIRS = [(check, fault) for check, faults in FAULTS.items() for fault in faults]
IN_PROCESS = [(c, f) for c, f in PAIRS if not issubclass(f, SharedLoopbackBackend)]
BETWEEN_PROCESSES = [(c, f) for c, f in PAIRS if issubclass(f, SharedLoopbackBackend)]


def name_of(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value).removeprefix("test_")


def suite_for(backend: type, deadline_s: float) -> BackendConformance:
    fabric = LoopbackFabric()
    between = issubclass(backend, SharedLoopbackBackend)
    path = f"{faulty.__file__}:{backend.__name__}"

    class Suite(BackendConformance):
        num_transfers = 1000
        min_raw_share = 0.5
        remote = (path, {}) if between else None

        def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
            return backend(limits=limits) if between else backend(fabric=fabric, limits=limits)

        def make_raw(self, pair):
            honest = faulty.Honest(fabric=fabric), faulty.Honest(fabric=fabric)
            for backend, buffer in zip(honest, (pair.src, pair.dst), strict=True):
                backend.register([buffer.region])
            peer = honest[0].connect(honest[1].metadata())

            def write(runs):
                honest[0].post(peer, runs, b"")
                honest[0].poll(0.0)

            return write

    suite = Suite()
    suite.deadline_s = deadline_s
    return suite


@pytest.mark.parametrize(("check", "fault"), IN_PROCESS, ids=name_of)
def test_planted_fault_fails_its_check(check: str, fault: type) -> None:
    assert check in failures(suite_for(fault, 0.05), [check])


@pytest.mark.check
@pytest.mark.parametrize(("check", "fault"), BETWEEN_PROCESSES, ids=name_of)
def test_planted_fault_between_processes_fails_its_check(check: str, fault: type) -> None:
    assert check in failures(suite_for(fault, 3.0), [check])


def test_every_check_has_a_planted_fault() -> None:
    assert sorted(FAULTS) == list(checks())


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (faulty.Nameless, "Nameless.name must be a str, is None"),
        (faulty.ClaimsReads, "ClaimsReads claims reads and is no ReadTransfers"),
        (faulty.PollsNothing, "PollsNothing.poll() must return a sequence of Completion"),
        (faulty.MetadataIsText, "MetadataIsText.metadata() must return bytes"),
    ],
    ids=name_of,
)
def test_a_backend_of_the_wrong_shape_is_told_in_a_sentence(backend: type, words: str) -> None:
    check = "test_calls_return_what_the_interface_says"
    assert words in failures(suite_for(backend, 0.05), [check])[check]


def test_a_failure_without_words_shows_its_line() -> None:
    check = "test_connecting_again_changes_nothing"
    why = failures(suite_for(faulty.NewPeerEachTime, 0.05), [check])[check]
    assert "assert" in why or "connect" in why
    assert why != "AssertionError: "


def test_another_error_than_transfer_error_is_named() -> None:
    check = "test_foreign_metadata_is_refused"
    why = failures(suite_for(faulty.RaisesWhatItLikes, 0.05), [check])[check]
    assert why == "AssertionError: TransferError expected, KeyError('what is this?') was raised"


def test_settings_of_the_suite_that_can_not_be_right_are_told() -> None:
    suite = suite_for(faulty.Honest, 0.05)
    suite.remote = "/path/to/file.py:MyBackend"  # type: ignore[assignment]
    check = "test_a_stopped_peer_holds_up_no_call"
    assert "`remote` is a pair" in failures(suite, [check])[check]
    one = suite.make_backend(limits=BackendLimits())
    suite.make_backend = lambda *, limits: one  # type: ignore[method-assign]
    check = "test_memory_is_registered_once"
    assert "a new backend at each call" in failures(suite, [check])[check]


def test_honest_backend_fails_none() -> None:
    assert failures(suite_for(faulty.Honest, 5.0)) == {}


def table() -> str:
    """Each check, and the planted faults that it finds."""
    lines = ["| check | finds, among others |", "| --- | --- |"]
    for check, faults in FAULTS.items():
        words = " ".join(check.removeprefix("test_").split("_"))
        found = "; ".join(f"`{f.__name__}`: {inspect.getdoc(f)}".rstrip(".") for f in faults)
        lines.append(f"| {words} | {found} |")
    return "\n".join(lines) + "\n"


def test_docs_have_the_table_of_planted_faults() -> None:
    text = DOCS.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == table(), "run: python " + __file__


if __name__ == "__main__":
    before, _, rest = DOCS.read_text().partition(BEGIN)
    DOCS.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
