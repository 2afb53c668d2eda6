from __future__ import annotations

import pytest

from tools.simulate_cluster import SIZES, Stages, Talks, at_random
from treadle.distributed.cluster.affinity import Affinity


@pytest.mark.slow
@pytest.mark.parametrize("n", SIZES)
def test_a_run_takes_what_the_formula_says(n: int) -> None:
    """In stages that are alike, and where one is twice as slow."""
    alike = (0.3 / n,) * n
    for compute in (alike, (*alike[:-1], 2 * alike[-1])):
        stages = Stages(compute, 0.0005, 32768, 1.25e9)
        assert stages.simulated() == pytest.approx(stages.runs_per_s(), rel=1e-3)
        for in_flight in (2, n, 2 * n):
            found = stages.simulated(in_flight, n_runs=2000 + 100 * n)  # the first fill the stages
            assert found == pytest.approx(stages.runs_per_s(in_flight), rel=0.02)


def test_times_that_vary_change_the_mean_of_one_run_in_flight_by_nothing() -> None:
    stages = Stages((0.01,) * 8, 0.0005, 32768, 1.25e9)
    assert stages.simulated(jitter=0.5) == pytest.approx(stages.runs_per_s(), rel=0.01)
    # With as many in flight as there are stages, the slowest holds up the others.
    assert stages.simulated(8, jitter=0.5) < 0.95 * stages.runs_per_s(8)


@pytest.mark.parametrize("n", SIZES)
def test_what_caches_know_is_what_the_formulas_say(n: int) -> None:
    talks = Talks(n)
    share, busiest = talks.simulated(Affinity().choose)
    # A talk may be moved, once, where its replica is busier than others by more than SLACK.
    assert share == pytest.approx(talks.cached(), abs=0.02)
    assert busiest < 2.0
    found, _ = talks.simulated(at_random())
    assert found == pytest.approx(talks.cached_at_random(), abs=0.02)
