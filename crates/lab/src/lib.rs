//! Workloads, CPU accounting, statistics, baselines and reports
