"""Rewards: plain callables over a rollout and its sample; None means not scorable or no such term.

None is never a zero: a rollout whose total is None leaves all statistics, and a term that is
None is left out of the sum.
"""
