"""Run the command line as ``python -m vitreous``."""

from vitreous.cli import main

if __name__ == "__main__":
    main()
