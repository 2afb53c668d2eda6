"""``python -m bench.kernel_study``, from the root of the checkout."""

from bench.kernel_study.command import main

if __name__ == "__main__":
    main()
