"""`python -m veritune` is `veritune`."""

from veritune.cli import main

if __name__ == "__main__":
    main()
