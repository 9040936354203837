"""Plans and reports, which cross between processes. Plain values."""
