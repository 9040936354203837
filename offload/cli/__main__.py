"""``python -m offload.cli``."""

from offload.cli import main

if __name__ == "__main__":
    main()
