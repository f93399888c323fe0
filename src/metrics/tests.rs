use super::*;

#[test]
fn every_metric_of_the_contract_is_there_from_the_start() {
    let metrics = Metrics::new("1.2.3", "cpu");
    metrics.request("/v1/chat/completions", 200);
    let text = metrics.render();
    for line in [
        "moestro_requests_total{endpoint=\"/v1/chat/completions\",status=\"200\"} 1",
        "moestro_requests_running 0",
        "moestro_requests_queued 0",
        "moestro_prompt_tokens_total{source=\"computed\"} 0",
        "moestro_prompt_tokens_total{source=\"cached\"} 0",
        "moestro_generated_tokens_total 0",
        "moestro_time_to_first_token_seconds_count 0",
        "moestro_inter_token_seconds_count 0",
        "moestro_request_seconds_count 0",
        "moestro_queue_seconds_count 0",
        "moestro_expert_lookups_total{phase=\"prefill\",result=\"prefetched\"} 0",
        "moestro_expert_lookups_total{phase=\"decode\",result=\"hit\"} 0",
        "moestro_expert_evictions_total 0",
        "moestro_expert_slots 0",
        "moestro_expert_slots_used 0",
        "moestro_expert_prefetches_total{outcome=\"used\"} 0",
        "moestro_expert_prefetches_total{outcome=\"wasted\"} 0",
        "moestro_ssd_reads_total 0",
        "moestro_ssd_read_bytes_total 0",
        "moestro_ssd_disk_bytes_total 0",
        "moestro_ssd_read_seconds_count 0",
        "moestro_ssd_stall_seconds_total 0",
        "moestro_ssd_errors_total 0",
        "moestro_pack_check_seconds_total 0",
        "moestro_memory_bytes{kind=\"workspace\"} 0",
        "moestro_memory_bytes{kind=\"draft\"} 0",
        "moestro_memory_bytes{kind=\"requests\"} 0",
        "moestro_memory_limit_bytes 0",
        "moestro_memory_pressure_total 0",
        "moestro_memory_bytes{kind=\"prompt_cache\"} 0",
        "moestro_prompt_cache_hits_total{source=\"session\"} 0",
        "moestro_prompt_cache_hits_total{source=\"memory\"} 0",
        "moestro_prompt_cache_misses_total 0",
        "moestro_prompt_cache_hits_total{source=\"disk\"} 0",
        "moestro_prompt_cache_bytes{place=\"disk\"} 0",
        "moestro_prompt_cache_disk_reads_total 0",
        "moestro_prompt_cache_disk_read_bytes_total 0",
        "moestro_prompt_cache_disk_writes_total 0",
        "moestro_prompt_cache_disk_written_bytes_total 0",
        "moestro_prompt_cache_hit_tokens_count 0",
        "moestro_prompt_cache_bytes{place=\"memory\"} 0",
        "moestro_prompt_cache_checkpoints{place=\"memory\"} 0",
        "moestro_prompt_cache_evictions_total{place=\"memory\"} 0",
        "moestro_prefill_seconds_count 0",
        "moestro_decode_seconds_count 0",
        "moestro_request_prompt_tokens_count 0",
        "moestro_request_generated_tokens_count 0",
        "moestro_answers_total{finish_reason=\"cancelled\"} 0",
        "moestro_build_info{device=\"cpu\",model=\"\",version=\"1.2.3\"} 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is missing from\n{text}");
    }
}

#[test]
fn what_runs_is_said_once() {
    let metrics = Metrics::new("1", "cpu");
    metrics.runs_on("metal");
    metrics.serves("demo");
    let text = metrics.render();
    let told: Vec<_> = text.lines().filter(|line| line.starts_with("moestro_build_info")).collect();
    assert_eq!(told, ["moestro_build_info{device=\"metal\",model=\"demo\",version=\"1\"} 1"]);
}

#[test]
fn two_servers_in_one_process_count_apart() {
    let (a, b) = (Metrics::new("0", "cpu"), Metrics::new("0", "cpu"));
    a.lookups_decode_hit.inc_by(3);
    a.inter_token_seconds.observe(0.012);
    assert!(a.render().contains("moestro_expert_lookups_total{phase=\"decode\",result=\"hit\"} 3"));
    assert!(a.render().contains("moestro_inter_token_seconds_bucket{le=\"0.02\"} 1"));
    assert!(a.render().contains("moestro_inter_token_seconds_bucket{le=\"0.01\"} 0"));
    assert!(b.render().contains("moestro_expert_lookups_total{phase=\"decode\",result=\"hit\"} 0"));
}

#[cfg(target_os = "linux")]
#[test]
fn the_process_reports_itself() {
    let text = Metrics::new("0", "cpu").render();
    for name in ["process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"] {
        assert!(text.contains(name), "{name} is missing");
    }
}
