"""Commands that train a task several times; `eventloop_experiments.runs` has what they share."""
