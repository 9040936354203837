"""The doctor's report for given numbers: its text, and its arithmetic."""

import json

import pytest

from offload.admin.doctor import EXIT_CODES, Facts, ModelVerdict, examine, refusal, to_json, to_text
from offload.config.schema import parse_config
from offload.layout.checks import GroupInput, LayoutInput
from offload.layout.groups import FULL, STATE, WINDOW
from tests.texts import same_text

MIB = 1 << 20


def make_group(group: int, kind: str, block: int, pages: int, **more) -> GroupInput:
    spec = {FULL: "full_attention", WINDOW: "sliding_window", STATE: "mamba"}[kind]
    return GroupInput(group, spec, kind, (f"layer.{group}",), block, pages, **more)


def facts_of(*groups: GroupInput, padded: int = 0, ranks: int = 1, **more) -> Facts:
    sizes = [group.block_tokens for group in groups]
    given = LayoutInput(groups, 100, min(sizes), max(sizes), max_tokens=100_000)
    pages = tuple(((g.block_bytes, padded or g.block_bytes),) for g in groups)
    return Facts("some/model", ranks, given, tuple(sizes), pages, **more)


def config_of(**more):
    return parse_config({"cpu": {"capacity": "256MiB"}, **more})


def hybrid(**more) -> Facts:
    """Each 64 tokens take two full blocks of 32 (16 KiB each), a window block of 64 and a state of
    64."""
    return facts_of(
        make_group(0, FULL, 32, 16384),
        make_group(1, WINDOW, 64, 16384, window_tokens=127),
        make_group(2, STATE, 64, 10000),
        padded=16384,
        **more,
    )


def test_text_of_a_hybrid_model():
    tiers = [{"type": "lmdb", "path": "/cache", "capacity": "1GiB"}]
    report = examine(
        hybrid(asked_block=16, notes=("a note",)), config_of(tiers=tiers, staging="1MiB")
    )
    assert report.ok
    same_text("layout_doctor_hybrid", to_text(report))


def test_tokens_of_each_tier():
    """256 MiB in slots of 16 KiB are 16,384 slots; each 64 tokens take four."""
    report = examine(hybrid(), config_of())
    (cpu,) = report.tiers
    assert cpu.tokens == 256 * MIB // 16384 // 4 * 64
    assert report.token_bytes == (3 * 16384 + 10000) / 64


def test_ranks_divide_the_capacity():
    tiers = [{"type": "lmdb", "path": "/cache", "capacity": "1GiB"}]
    config = config_of(tiers=tiers, staging="1MiB")
    one, two = (examine(hybrid(ranks=ranks), config).tiers[1].tokens for ranks in (1, 2))
    assert one == 2 * two
    one, two = (examine(hybrid(ranks=ranks), config_of()).tiers[0].tokens for ranks in (1, 2))
    assert one == 2 * two


def test_window_far_below_the_alignment_keeps_only_its_tail():
    """Alignment 512, window of one block of 32: one of 16 chunks is kept."""
    facts = facts_of(
        make_group(0, FULL, 512, 4096), make_group(1, WINDOW, 32, 4096, window_tokens=31)
    )
    assert examine(facts, config_of()).token_bytes == 2 * 4096 / 512


def test_refused_kind_has_no_tiers_and_a_fix():
    facts = facts_of(
        make_group(0, FULL, 32, 64), make_group(1, STATE, 64, 64, unaligned_state=True)
    )
    report = examine(facts, config_of(), ["$.tires: unknown option"])
    assert report.verdict == ModelVerdict.REFUSED, "even if the configuration is wrong"
    report = examine(facts, config_of())
    assert report.verdict == ModelVerdict.REFUSED
    assert report.tiers == ()
    same_text("layout_doctor_refused", to_text(report))


def test_tier_too_small_for_one_chunk_is_refused():
    facts = facts_of(make_group(0, FULL, 32, 300 * MIB))
    report = examine(facts, config_of())
    assert not report.ok
    assert "$.cpu.capacity" in report.refused[0]
    assert report.verdict == ModelVerdict.WRONG_FLAGS, (
        "the model can be offloaded, with more memory"
    )


def test_chunk_blocks_of_the_configuration_are_used():
    report = examine(facts_of(make_group(0, FULL, 32, 64)), config_of(chunk_blocks=4))
    assert (report.groups[0].chunk_tokens, report.alignment_tokens) == (128, 128)


def test_a_block_size_that_only_some_groups_use():
    report = examine(hybrid(asked_block=32), config_of())
    assert report.notes == ("--block-size 32 was requested; vLLM uses blocks of 32 and 64 tokens",)
    facts = facts_of(make_group(0, FULL, 32, 16384), asked_block=32)
    assert examine(facts, config_of()).notes == ()


def test_spans_of_chunked_local_attention_are_named():
    facts = facts_of(make_group(0, WINDOW, 32, 16384, span_tokens=128))
    report = examine(facts, config_of())
    assert (report.groups[0].window_tokens, report.groups[0].span_tokens) == (0, 128)
    assert "last span of 128 tokens" in to_text(report)


def test_skipped_group_restores_nothing():
    facts = facts_of(make_group(0, FULL, 32, 64), make_group(1, FULL, 32, 64, skipped="scratch"))
    report = examine(facts, config_of())
    assert report.groups[1].chunk_tokens == 0
    assert "nothing" in to_text(report)


@pytest.mark.parametrize("problems", [(), ("$.tiers: bad",)])
def test_json_and_text_agree(problems):
    report = examine(hybrid(), config_of(), problems)
    read = json.loads(json.dumps(to_json(report)))
    assert read["ok"] is report.ok is not bool(problems)
    assert [group["kind"] for group in read["groups"]] == [
        "full_attention",
        "sliding_window",
        "mamba",
    ]
    assert read["tiers"][0]["tokens"] == report.tiers[0].tokens


def test_a_report_with_only_a_refusal():
    reason = "vLLM itself refuses: no such model"
    text = to_text(refusal("m", ModelVerdict.UNKNOWN_MODEL, reason))
    assert text.splitlines() == [
        "Model    m",
        "Refused  vLLM itself refuses: no such model",
        "Verdict  unknown: there is no such model here",
    ]
    assert not refusal("m", ModelVerdict.UNKNOWN_MODEL, reason).ok


def test_every_verdict_has_its_own_exit_code():
    assert EXIT_CODES.keys() == set(ModelVerdict)
    assert sorted(EXIT_CODES.values()) == [0, 1, 2, 3, 4]
