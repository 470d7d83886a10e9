"""The recovery matrix: real training runs of many suites, under the same failures, each recovered from in several ways."""
