"""What is shown of runs: pictures, tables, reports, others' published figures."""
