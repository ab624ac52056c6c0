"""`Mode.AG`: dispatch as an all-gather of every rank's tokens, combine as a reduce-scatter, over the collectives of any
transport that has them. docs/algorithm-ag.md says what moves where and when it pays."""
