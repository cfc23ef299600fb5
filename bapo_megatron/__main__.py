"""``python -m bapo_megatron``."""

from bapo_megatron.cli import main

if __name__ == "__main__":
    main()
