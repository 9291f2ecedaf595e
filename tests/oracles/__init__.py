"""Published simulators and tables of the papers, as they are: to compare with, never to plan by."""
