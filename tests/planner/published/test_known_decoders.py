"""Published decoders: their sizes give the number of parameters that their authors print."""

from __future__ import annotations

import pytest

from elastic.errors import SpecError
from elastic.planner.published import known_decoders


@pytest.mark.parametrize("found", known_decoders.known().values(), ids=lambda found: found.name)
def test_parameters_are_as_many_as_published(found: known_decoders.KnownDecoder) -> None:
    assert found.decoder.n_params / 1e9 == pytest.approx(found.params_b, rel=0.005)
    assert found.source
    assert found.batch_tokens >= found.decoder.seq


def test_names_and_changes() -> None:
    assert known_decoders.find("Llama3_70B").name == "llama3-70b"
    assert known_decoders.find("8b").name == "llama3-8b"
    longer = known_decoders.find("8b, seq=16384")
    assert (longer.decoder.seq, longer.decoder.hidden) == (16384, 4096)
    own = known_decoders.find(
        "layers=80,hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256,seq=8192"
    )
    assert own.decoder == known_decoders.find("70b").decoder
    assert (
        known_decoders.find(
            "layers=2,hidden=64,heads=4,ffn=256,vocab=512,seq=128,gated=0"
        ).decoder.kv_heads
        == 4
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("lama3-70b", "did you mean llama3-70b"),
        ("lamma3-70b", "did you mean llama3-70b"),
        ("405", "did you mean llama3-405b"),
        ("nothing-like-it", "there is llama3-8b"),
        ("layers=2,hidden=64,heads=4,vocab=512,seq=128", "ffn is missing"),
        ("8b,sequence=9", "'sequence' is no size of a model; did you mean seq"),
        ("8b,seq=long", "seq must be a whole number"),
        ("8b,seq=0", "seq must be a whole number"),
        ("8b,heads=3", "heads=3 must divide hidden=4096"),
        ("8b,kv_heads=5", "kv_heads=5 must divide heads=32"),
        ("8b,experts=8", "give both, or neither"),
    ],
)
def test_no_such_model(text: str, what: str) -> None:
    with pytest.raises(SpecError, match=what) as caught:
        known_decoders.find(text)
    assert "\n" not in str(caught.value)
