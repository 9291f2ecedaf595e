"""See ``cost_model.goodput.replanning.asking``."""

from cost_model.goodput.replanning.asking import main

if __name__ == "__main__":
    main()
