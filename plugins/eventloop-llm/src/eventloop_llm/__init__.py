"""Nothing but what it depends on: the packages that train language models after their pre-training."""
