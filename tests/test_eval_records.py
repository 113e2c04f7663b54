"""Records of an evaluation on disk, and the figures made of them."""

import json
import math
from functools import partial

import pytest
from samples import SETTINGS, many, record

from magicpig.evals import records
from magicpig.evals.records import Records
from magicpig.evals.summary import AVERAGE, summary

# Records on disk


def test_records_are_there_again_after_the_file_was_closed(tmp_path):
    with Records(tmp_path / "new" / "folder", SETTINGS) as opened:
        opened.append(record(index=0))
        opened.append(record(index=1, output="a\nb"))
    with Records(tmp_path / "new" / "folder", SETTINGS) as opened:
        assert list(opened) == [record(index=0), record(index=1, output="a\nb")]
        assert opened.done("vt", 4096, "easy", 1, "full")
        assert not opened.done("vt", 4096, "easy", 2, "full")
        assert not opened.done("vt", 4096, "hard", 1, "full")
        opened.append(record(index=2))
    found, settings = records.read(tmp_path / "new" / "folder")
    assert [one["index"] for one in found] == [0, 1, 2]
    assert settings == json.loads(json.dumps(SETTINGS))


def test_a_record_is_on_its_way_to_the_disk_at_once(tmp_path):
    with Records(tmp_path, SETTINGS) as opened:
        opened.append(record())
        assert records.read(tmp_path)[0] == [record()]


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_a_line_that_a_crash_cut_is_dropped(tmp_path, cut):
    with Records(tmp_path, SETTINGS) as opened:
        opened.append(record(index=0))
        opened.append(record(index=1))
    file = tmp_path / "samples.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    assert records.read(tmp_path)[0] == [record(index=0)]
    with Records(tmp_path, SETTINGS) as opened:
        assert list(opened) == [record(index=0)]
        opened.append(record(index=1))
    assert file.read_bytes() == whole


def test_what_is_no_record_is_refused_and_left_alone(tmp_path):
    with Records(tmp_path, SETTINGS) as opened:
        opened.append(record())
        with pytest.raises(ValueError, match=r"record of task vt, length 4096, .* already"):
            opened.append(record())
        with pytest.raises(ValueError, match="without method"):
            opened.append({k: v for k, v in record(index=1).items() if k != "method"})
        with pytest.raises(ValueError, match="not JSON compliant"):
            opened.append(record(index=1, score=math.nan))
        assert not opened.done("vt", 4096, "easy", 1, "full")
        assert len(opened) == 1
    file = tmp_path / "samples.jsonl"
    broken = b"{oops\n" + file.read_bytes()
    file.write_bytes(broken)
    with pytest.raises(ValueError, match=r"line 1 of '.*samples.jsonl' is not JSON"):
        Records(tmp_path, SETTINGS)
    assert file.read_bytes() == broken
    (tmp_path / "settings.json").write_text("{oops")
    for opened in (partial(Records, tmp_path, SETTINGS), partial(records.read, tmp_path)):
        file.write_bytes(b"")
        with pytest.raises(ValueError, match=r"settings.json' is not JSON, or no object"):
            opened()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed = 0, and seed is 1 now"),
        ({"window": {"sinks": 4}}, r'window = {"sinks": 16}, and window is {"sinks": 4} now'),
        ({"dtype": "float32"}, 'dtype = unset, and dtype is "float32" now'),
    ],
)
def test_other_settings_are_refused(tmp_path, change, message):
    Records(tmp_path, SETTINGS).close()
    with pytest.raises(ValueError, match=message):
        Records(tmp_path, {**SETTINGS, **change})
    with pytest.raises(ValueError, match="model is unset now"):
        Records(tmp_path, {name: SETTINGS[name] for name in SETTINGS if name != "model"})
    Records(tmp_path, SETTINGS).close()


def test_one_evaluation_at_a_time(tmp_path):
    with Records(tmp_path, SETTINGS), pytest.raises(ValueError, match="another evaluation"):
        Records(tmp_path, SETTINGS)
    Records(tmp_path, SETTINGS).close()


def test_a_folder_without_records_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"there is no samples.jsonl in"):
        records.read(tmp_path)


# Figures


def test_scores_and_errors():
    scores = {"vt": [1.0, 0.0, 0.5, 0.5], "cwe": [1.0, 1.0, 0.0]}
    cells = summary(
        record(task, index=i, score=score)
        for task, its in scores.items()
        for i, score in enumerate(its)
    )
    first, second, average = cells
    assert (first.task, second.task, average.task) == ("vt", "cwe", AVERAGE)
    assert (first.samples, second.samples, average.samples, average.tasks) == (4, 3, 7, 2)
    assert first.score == 50
    assert first.error == pytest.approx(100 * math.sqrt(0.5 / 3) / 2)
    assert second.score == pytest.approx(200 / 3)
    assert second.error == pytest.approx(100 * math.sqrt(1 / 3) / math.sqrt(3))
    assert average.score == pytest.approx((50 + 200 / 3) / 2)
    assert average.error == pytest.approx(math.hypot(first.error, second.error) / 2)


def test_an_error_needs_two_samples_or_one_that_brings_it():
    assert summary([record()])[0].error is None
    assert summary([record(), record("cwe"), record("cwe", index=1)])[-1].error is None
    assert summary([record(score_error=0.1)])[0].error == pytest.approx(10)


def test_costs_are_ratios_of_sums():
    heavy = {"steps": 30, "rows": 50, "tokens": 4000, "row_bytes": 0, "search_bytes": 3e6}
    first = record(method="lsh", output="another")
    second = record(method="lsh", index=1, cost={**heavy, "search_ops": 0})
    both = [record(index=index) for index in range(2)]
    for one in summary([first, second, *both])[:2]:
        assert one.keys_read == 250 / 5000
        assert one.row_bytes == 4e6 / 40
        assert one.search_bytes == 4e6 / 40
        assert one.moved_bytes == 8e6 / 40
        assert one.search_ops == 2e6 / 40
        assert one.same_as_full == 0.5


def test_what_is_not_known_is_none():
    nothing = dict.fromkeys(record()["cost"], 0)
    for cost in (None, nothing):
        one = summary([record(method="lsh", cost=cost)])[0]
        assert one.keys_read is None
        assert one.moved_bytes is None
        assert one.same_as_full is None


def test_perplexities_are_averaged_as_logarithms():
    its = {"metric": "perplexity"}
    cells = summary(
        [
            record("book", score=8.0, **its),
            record("book", index=1, score=2.0, **its),
            record("code", score=1.0, score_error=0.5, **its),
        ]
    )
    book, code, average = cells
    assert book.score == pytest.approx(4)
    assert book.error == pytest.approx(4 * math.log(2))
    assert (code.score, code.error) == (1, 0.5)
    assert average.score == pytest.approx(2)
    assert average.error == pytest.approx(2 * math.hypot(math.log(2), 0.5) / 2)
    with pytest.raises(ValueError, match="metric must be one of score, perplexity, not 'bleu'"):
        summary([record(metric="bleu")])


def test_cells_stand_in_one_order_whatever_the_order_of_records():
    cells = summary(sorted(many(), key=lambda one: -one["length"]))
    assert [one.length for one in cells] == [4096] * 18 + [8192] * 18
    assert [one.task for one in cells[:3]] == ["vt", "cwe", AVERAGE]
    assert [one.method for one in cells[:9:3]] == ["full", "lsh:10:150", "streaming"]
    assert [one.protocol for one in cells[:18:9]] == ["easy", "hard"]
