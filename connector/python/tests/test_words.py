"""What users and routers write: read, or refused with what to write instead."""

from __future__ import annotations

import pytest
from engine import BLOCKS, HEADS, SIZE, TOKENS, LayerTensor, Memory

import kvferry


def config(options, **changes):
    facts = {"engine_id": "e", "role": "both", "load_failure_policy": "fail", **changes}
    return kvferry.Config(options, **facts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine_id": "x"}, ["engine_id", "take it out", "kv_transfer_config.engine_id"]),
        ({"role": "decode"}, ["role", "kv_role"]),
        ({"load_failure_policy": "recompute"}, ["kv_load_failure_policy"]),
        ({"layerwise": True}, ["layerwise"]),
        ({"transport": "loopback"}, ["transport", "tcp"]),
        ({"order": "prefill-first"}, ["order", "decode-first"]),
        ({"tier_bytes": 1 << 20}, ["tier_bytes", "write 0"]),
        ({"write_back_blocks": 1}, ["write_back_blocks", "write 0"]),
        ({"lease_ttl": 1}, ["lease_ttl", "lease_ttl_ms"]),
        ({"lease_ttl_ms": -1}, ["lease_ttl_ms", "whole number"]),
        ({"lease_ttl_ms": {}}, ["lease_ttl_ms", "dict"]),
        ({"lanes": 65}, ["kv_connector_extra_config: lanes = 65", "1 to 64"]),
        ({"listen": "127.0.0.1:65535"}, ["listen", "lower port"]),
        ({"psk": "sixteen bytes at least"}, ["psk_file", "KVFERRY_PSK"]),
        ({"config_file": "/nowhere.toml"}, ["config_file in kv_connector_extra_config names /nowhere.toml", "No such file"]),
        ({"listne": "10.0.0.7:7400"}, ["listne", "no such key; write listen"]),
        ({"configfile": "x"}, ["no such key; write config_file"]),
        ({"colour": "sixteen"}, ["no such key; the keys are listen, advertise,", "slab_pool_bytes, config_file"]),
    ],
)
def test_what_cannot_be_configured_is_refused_with_what_to_write(psk, options, words):
    with pytest.raises(ValueError) as refused:
        config({"psk_file": str(psk), **options}, tp_rank=1, tp_size=2)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "sixteen" not in str(refused.value)


def test_a_key_is_needed_and_may_come_from_anywhere(psk, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="psk_file is missing: .* set it in kv_connector_extra_config or its config_file"):
        config({})
    file = tmp_path / "kvferry.toml"
    file.write_text(f"psk_file = '{psk}'\nlease_ttl_ms = 1000\n")
    config({"config_file": str(file)})
    file.write_text("lease_ttl = 1000\n")
    with pytest.raises(ValueError, match="line 1, key \"lease_ttl\": no such key; write lease_ttl_ms"):
        config({"config_file": str(file), "psk_file": str(psk)})
    file.write_text("role = 'decode'\n")
    with pytest.raises(ValueError, match="kv_role"):
        config({"config_file": str(file), "psk_file": str(psk)})
    monkeypatch.setenv("KVFERRY_PSK", "a key of the environment")
    config({"lanes": 3, "link_gbps": 0.5, "peers": ["127.0.0.1:1"], "listen": "127.0.0.1:0"})


def test_of_two_keys_the_log_says_which_is_used(psk, monkeypatch, capfd):
    kvferry.init_log("info")
    config({"psk_file": str(psk)})
    assert "psk_file" not in capfd.readouterr().err
    monkeypatch.setenv("KVFERRY_PSK", "a key of the environment")
    config({"psk_file": str(psk)})
    assert "psk_file and KVFERRY_PSK both give a key: that of KVFERRY_PSK is used" in capfd.readouterr().err


def test_an_engine_that_is_not_told_where_to_listen_says_who_cannot_reach_it(engines, capfd):
    kvferry.init_log("info")
    first = engines("a", "prefill")
    assert "engines of other hosts cannot reach this one" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="another process has that port: write another in `listen`, or port 0"):
        engines("b", "prefill", options={"listen": first.worker.address})
    assert "other hosts" not in capfd.readouterr().err


FETCH = {"do_remote_prefill": True, "transfer_id": "1" * 32, "remote_addresses": ["127.0.0.1:7400"]}


@pytest.mark.parametrize(
    ("role", "params", "words"),
    [
        ("both", {"do_remote_prefill": True, "do_remote_decode": True}, "both true"),
        ("both", {"do_remote_prefill": True}, "transfer_id is missing"),
        ("both", {"do_remote_prefill": 1}, "do_remote_prefill must be true or false; found int"),
        ("both", {**FETCH, "remote_addresses": "127.0.0.1:7400"}, "must be a list of texts, one for each rank, such as ["),
        ("both", {**FETCH, "remote_addresses": []}, "0 of them"),
        ("both", {**FETCH, "remote_addresses": None}, "neither remote_addresses nor remote_host"),
        ("both", {**FETCH, "remote_addresses": ["host:1"]}, "names are not looked up"),
        ("both", {**FETCH, "remote_addresses": None, "remote_host": "host", "remote_port": 1}, "no IP address"),
        ("both", {**FETCH, "remote_addresses": None, "remote_host": "127.0.0.1", "remote_port": 70000}, "remote_port"),
        ("both", {"do_remote_decode": True, "tp_size": 0}, "1 to 1024"),
        ("both", {"do_remote_decode": True, "tp_size": 65534}, "1 to 1024"),
        ("decode", {"do_remote_decode": True}, "kv_producer or kv_both"),
        ("both", {"do_remote_decode": True}, "max_tokens = 1"),
    ],
)
def test_params_that_make_no_sense_are_refused_and_the_request_stays_here(psk, role, params, words):
    scheduler = kvferry.Scheduler(config({"psk_file": str(psk)}, role=role), tokens_per_block=16, whole_blocks=True)
    with pytest.raises(ValueError, match="request r") as refused:
        scheduler.add("r", list(range(40)), "", 2, params)
    assert words in str(refused.value)
    assert scheduler.matched_tokens("r", 0) == 0
    scheduler.allocated("r", [1, 2, 3], 0)
    assert scheduler.build_step([], []) == (None, False, [])
    assert scheduler.finished("r", [1, 2, 3], True) == (False, None)
    assert not scheduler.has_pending()


@pytest.mark.parametrize(
    ("role", "params", "words"),
    [
        ("both", {**FETCH, "tp_size": 0}, "1 to 1024"),
        ("both", {**FETCH, "tp_size": "2"}, "tp_size must be a whole number, 1 to 1024; found str"),
    ],
)
def test_where_the_params_of_a_refused_leg_say_who_waits_for_it_that_one_is_told_once(psk, role, params, words):
    scheduler = kvferry.Scheduler(config({"psk_file": str(psk)}, role=role), tokens_per_block=16, whole_blocks=True)
    with pytest.raises(ValueError, match="request r") as refused:
        scheduler.add("r", list(range(40)), "", 2, params)
    assert words in str(refused.value)
    assert scheduler.matched_tokens("r", 0) == 0
    assert scheduler.has_pending()
    assert scheduler.build_step([], [])[0] is not None
    assert scheduler.build_step([], [])[0] is None
    assert scheduler.finished("r", [1, 2, 3], True) == (False, None)
    # Not where it would be this engine itself.
    scheduler.set_addresses(FETCH["remote_addresses"])
    assert not scheduler.unwanted("s", [0], "", FETCH)


@pytest.mark.parametrize(
    ("role", "params", "words"),
    [
        ("both", {**FETCH, "remote_num_tokens": 51}, "prefill's prompt has 51 tokens, this one 40"),
        ("both", {**FETCH, "remote_prompt": "00" * 16}, "prefill computed another prompt"),
        ("prefill", FETCH, "kv_consumer or kv_both"),
    ],
)
def test_a_leg_that_was_mixed_up_takes_nothing_from_the_one_whose_params_it_has(psk, role, params, words):
    scheduler = kvferry.Scheduler(config({"psk_file": str(psk)}, role=role), tokens_per_block=16, whole_blocks=True)
    with pytest.raises(ValueError, match="request r") as refused:
        scheduler.add("r", list(range(40)), "", 2, params)
    assert words in str(refused.value)
    assert not scheduler.has_pending()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"remote_addresses": ["127.0.0.1:0"]}, "nobody can listen on 127.0.0.1:0"),
        ({"remote_addresses": ["0.0.0.0:7400"]}, "nobody can listen on 0.0.0.0:7400"),
        ({"remote_addresses": ["255.255.255.255:9"]}, "nobody can listen on"),
        ({"remote_addresses": ["127.0.0.1:7400"] * 2, "tp_size": 2}, "stands there twice"),
        ({"remote_addresses": ["127.0.0.1:7400"], "tp_size": 2}, "1 for tp_size 2"),
        ({"remote_addresses": ["B" * 10_000_000]}, "is not IP:port"),
        ({"remote_addresses": None, "remote_host": "B" * 10_000_000, "remote_port": 1}, "is no IP address"),
        ({"transfer_id": ""}, "transfer_id is empty"),
        ({"transfer_id": "t" * 257}, "transfer_id has 257 bytes; give it at most 256"),
        ({"remote_prompt": "ZZ\nWARNING"}, '"ZZ\\nWARNING" is not 32 hexadecimal digits'),
    ],
)
def test_hostile_values_are_refused_in_few_words(psk, params, words):
    scheduler = kvferry.Scheduler(config({"psk_file": str(psk)}, role="both"), tokens_per_block=16, whole_blocks=True)
    with pytest.raises(ValueError, match="request r") as refused:
        scheduler.add("r", list(range(40)), "", 2, {**FETCH, **params})
    assert words in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_warning_of_keys_is_short_and_one_line_whatever_they_are():
    hostile = {"transfer_id": "x", "a\nWARNING forged": 1, "K" * 10_000_000: 1, **{f"key {i}": 1 for i in range(100_000)}}
    keys = kvferry.keys_without_leg(hostile)
    assert len(keys) == 8 and "\n" not in "".join(keys) and len("".join(keys)) < 800


@pytest.mark.parametrize(
    ("params", "keys"),
    [
        ({"do_remote_prefil": True, "transfer_id": "x"}, ["do_remote_prefil", "transfer_id"]),
        ({"do_remote_decod": True}, ["do_remote_decod"]),
        ({"do_remote_prefill": None, "transfer_id": "x"}, ["do_remote_prefill", "transfer_id"]),
        ({"do_remote_prefill": False, "transfer_id": "x"}, []),
        ({"do_remote_decode": True}, []),
        ({"another connector's": 1}, []),
        ({}, []),
    ],
)
def test_params_that_speak_of_a_transfer_and_name_no_leg_are_found(params, keys):
    assert kvferry.keys_without_leg(params) == keys


@pytest.mark.parametrize("params", [{}, {"do_remote_prefill": False, "do_remote_decode": None}, {"transfer_id": "x"}])
def test_a_request_without_a_part_in_a_transfer_leaves_no_trace(psk, params):
    scheduler = kvferry.Scheduler(config({"psk_file": str(psk)}), tokens_per_block=16, whole_blocks=True)
    assert scheduler.add("r", list(range(40)), "", 64, params) is None
    assert scheduler.matched_tokens("r", 0) == 0
    assert scheduler.unsaved() == [] and not scheduler.has_pending()
    assert scheduler.finished("r", [1], True) == (False, None)


def test_ranks_may_be_named_by_their_first_port(psk):
    scheduler = kvferry.Scheduler(config({"psk_file": str(psk)}), tokens_per_block=16, whole_blocks=True)
    one = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": 7400, "tp_size": 2}
    assert scheduler.add("r", list(range(40)), "", 2**32, one) is None
    assert scheduler.matched_tokens("r", 16) == 24
    assert scheduler.matched_tokens("r", 32) == 8


def test_layouts_are_read_off_shapes_and_strides():
    memory = Memory()
    assert kvferry.layout_of(memory.facts()) == ("LBHPNC", 1)
    assert kvferry.layout_of(memory.facts(whole_pages=False)) == ("LBHNPC", 1)

    def other(axes, shape, stride, apart=False, **changes):
        facts = memory.facts(axes=axes, whole_pages=False, **changes)
        size = len(memory.bytes) // len(facts.layers)
        for index, layer in enumerate(facts.layers):
            layer.shape, layer.stride = shape, stride
            if apart:
                layer.storage_ptr, layer.storage_bytes = layer.data_ptr, size
        return kvferry.layout_of(facts)

    n, h, c = TOKENS, HEADS, SIZE
    # vLLM's LBNHC; FlashInfer's (NB, 2, N, H, D) and FlashAttention's (2, NB, N, H, D) of earlier releases.
    assert other("BHNC", (BLOCKS, h, n, 2 * c), (h * n * 2 * c, 2 * c, h * 2 * c, 1), apart=True) == ("LBNHPC", 3)
    assert other("BPNHC", (BLOCKS, 2, n, h, c), (2 * n * h * c, n * h * c, h * c, c, 1)) == ("LBPNHC", 1)
    assert other("PBNHC", (2, BLOCKS, n, h, c), (BLOCKS * n * h * c, n * h * c, h * c, c, 1)) == ("LPBNHC", 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cuda"}, "run the engine on the CPU"),
        ({"dtype": "uint8"}, "kv_cache_dtype at auto"),
        ({"layers": []}, "no attention layer"),
        ({"blocks": BLOCKS + 1}, "axis B"),
        ({"tokens_per_block": 2 * TOKENS}, "--block-size"),
        ({"heads": 1}, "axis H"),
        ({"axes": "BHN"}, "axes BHN"),
        ({"head_size_k": SIZE + 1}, "axis C"),
    ],
)
def test_memory_that_cannot_be_used_in_place_is_refused_with_the_reason(change, words):
    with pytest.raises(ValueError, match="cannot be used in place") as refused:
        kvferry.layout_of(Memory().facts(**change))
    assert words in str(refused.value)


def test_a_layer_that_is_another_or_reaches_past_its_memory_is_refused(psk):
    memory = Memory()
    facts = memory.facts()
    facts.layers[2] = LayerTensor(**{**vars(facts.layers[2]), "stride": (1, 2, 3, 1)})
    with pytest.raises(ValueError, match="layers.0.attn and layers.2.attn differ"):
        kvferry.layout_of(facts)
    facts = memory.facts()
    for layer in facts.layers:
        layer.storage_bytes -= 1
    from engine import ModelFacts

    with pytest.raises(RuntimeError, match="KV cache"):
        kvferry.Worker(
            config({"psk_file": str(psk)}),
            incarnation=1,
            cache=facts,
            model=ModelFacts(),
            tensors=memory,
            request_failures=True,
        )


def test_a_fingerprint_tells_models_apart(tmp_path):
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    first.write_bytes(bytes(300_000))
    second.write_bytes(b"weights")
    whole = kvferry.fingerprint("{}", [first, second])
    assert len(whole) == 64 and whole == kvferry.fingerprint("{}", [second, first])
    assert whole != kvferry.fingerprint("{ }", [first, second])
    changed = bytearray(300_000)
    for place in (0, 150_000, -1):
        changed[place] = 1
        first.write_bytes(changed)
        assert whole != kvferry.fingerprint("{}", [first, second]), place
        changed[place] = 0
    with pytest.raises(ValueError, match="cannot be read"):
        kvferry.fingerprint("{}", [tmp_path / "none"])
