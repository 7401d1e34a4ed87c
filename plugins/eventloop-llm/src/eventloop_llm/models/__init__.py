"""Models of transformers: loaded, run, compared with a reference, adapted by peft, written as folders."""
