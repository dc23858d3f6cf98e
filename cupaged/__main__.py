"""``python -m cupaged``: the command line."""

from cupaged.cli import main

if __name__ == "__main__":
    main()
