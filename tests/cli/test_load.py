"""Finding models by name and by folder."""

import json
from pathlib import Path

import pytest

from unimem_jax.errors import UsageError
from unimem_jax.load import installed, load


def test_a_model_is_found_by_the_name_that_it_was_installed_under(models):
    model, params, tokenizer = load("tiny")
    assert type(model).__name__ == "Hybrid"
    assert "embedding" in params
    assert tokenizer is None
    assert {"tiny", "silent", "embedded"} <= installed().keys()


def test_an_unknown_name_is_answered_with_the_names_there_are(models):
    with pytest.raises(UsageError, match=r"'nope'; installed models: .*embedded, .*tiny"):
        load("nope")


def test_an_entry_point_that_leads_nowhere_is_named(models):
    with pytest.raises(UsageError, match="'broken' is installed but broken"):
        load("broken")


def test_a_folder_is_read_by_the_model_type_that_it_names(models, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    with pytest.raises(UsageError, match="no weights in"):
        load(tmp_path)
    (tmp_path / "weights").touch()
    assert type(load(str(tmp_path))[0]).__name__ == "Hybrid"


def test_a_path_is_no_name_even_if_a_model_has_it(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent/config.json").write_text(json.dumps({"model_type": "tiny"}))
    (tmp_path / "silent/weights").touch()
    assert type(load(Path("silent"))[0]) is not type(load("silent")[0])
    with pytest.raises(UsageError, match="no model, folder or file is called 'tiny'"):
        load(Path("tiny"))


@pytest.mark.parametrize(
    "config, message",
    [
        (None, "cannot read .*config.json.*installed models: .*tiny"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[1]", "model type None"),
        (b"{}", "model type None"),
        (b'{"model_type": 3}', "model type 3"),
        (b'{"model_type": "gpt9"}', "'gpt9', for which no model is installed; .*tiny"),
    ],
)
def test_a_folder_that_no_model_reads_is_refused(models, tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(UsageError, match=message):
        load(tmp_path)
