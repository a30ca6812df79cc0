"""Expert parallelism: experts are spread over ranks of dp x cp, and tokens travel to them and back."""
