"""``python -m vitreous`` is the command line."""

from vitreous.cli import main

if __name__ == "__main__":
    main()
