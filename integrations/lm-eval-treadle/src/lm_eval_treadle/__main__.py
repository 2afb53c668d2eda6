"""``lm-eval-treadle``: the command ``lm-eval`` with the model ``treadle`` registered."""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

import lm_eval_treadle


def main() -> None:
    """Run lm-eval's command line."""
    assert lm_eval_treadle.__all__  # imported, and so registered
    cli_evaluate()


if __name__ == "__main__":
    main()
