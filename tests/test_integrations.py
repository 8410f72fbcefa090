import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import selfnorm as sn
from selfnorm.errors import DataError
from selfnorm.integrations import Scorer


def rows(n, seed):
    size = np.random.default_rng(seed).normal(size=n)
    return pa.table({"size": size, "kind": np.where(size > 0, "a", "b")})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sn.EnergyDensity(max_steps=5, random_state=0).fit(rows(300, 0)).save(folder)
    return folder


def test_tables_batches_and_frames_have_the_same_scores(folder):
    scorer, table = Scorer(folder), rows(100, 1)
    scored = scorer(table)
    (batch,) = scorer.map(iter(table.combine_chunks().to_batches()))
    assert scored.schema == batch.schema == scorer.schema(table.schema)
    assert pa.Table.from_batches([batch]).equals(scored.combine_chunks())
    frame = table.to_pandas().set_axis(np.arange(100) + 7)
    pd.testing.assert_frame_equal(
        scorer(frame).reset_index(drop=True), scored.to_pandas(), check_dtype=False
    )
    assert scorer(frame).index[0] == 7


def test_a_scorer_of_a_folder_travels_without_its_model(folder):
    scorer, table = Scorer(folder, normalizer="learned"), rows(100, 1)
    scored = scorer(table)
    assert len(pickle.dumps(scorer)) < 1000
    assert pickle.loads(pickle.dumps(scorer))(table).equals(scored)
    assert pickle.loads(pickle.dumps(Scorer(scorer.density, normalizer="learned")))(table).equals(
        scored
    )
    with pytest.raises(DataError, match="no folder of a model"):
        Scorer(folder / "none")
