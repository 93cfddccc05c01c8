"""Episodes, the engines that generate in them, and how they are collected."""
