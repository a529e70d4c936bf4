//! Decode of `kernels/cuda/attention.cu` against float64, and its invariant.
#![expect(unsafe_code, reason = "launches")]

mod common;

use std::num::NonZeroU32;

use common::{Numbers, bytes_of, decode, encode};
use kvferry_cuda_sim::{Fault, SimDevice, SimError, SimMemory, SimStream};
use kvferry_kernels::cuda::{
    DecodeBatch, DecodeJob, DecodeOptions, DevicePages, DevicePtr, DeviceRegions, Element, JobError,
};
use kvferry_protocol::BlockId;
use kvferry_protocol::layout::{KvLayout, KvShape};

#[derive(Clone, Debug)]
struct Model {
    q_heads: usize,
    kv_heads: usize,
    dim: usize,
    cache: Element,
    queries: Element,
    window: Option<u32>,
    sinks: bool,
    kv_scales: [f32; 2],
}

const MODEL: Model = Model {
    q_heads: 4,
    kv_heads: 2,
    dim: 64,
    cache: Element::Bf16,
    queries: Element::F32,
    window: None,
    sinks: false,
    kv_scales: [1.0; 2],
};

/// How a cache is laid out.
#[derive(Clone, Copy, Debug)]
struct Housing {
    order: &'static str,
    tokens_per_block: u32,
    seed: u64,
}

const PLAIN: Housing = Housing { order: "LPBNHC", tokens_per_block: 16, seed: 1 };

/// One sequence: bits of keys and values `[tokens][kv_heads][dim]`, and of one query `[q_heads][dim]`.
struct Sequence {
    tokens: usize,
    kv: [Vec<u32>; 2],
    query: Vec<u32>,
}

impl Model {
    fn sequence(&self, seed: u64, tokens: usize) -> Sequence {
        let mut numbers = Numbers::new(seed);
        let mut some =
            |count: usize, element| (0..count).map(|_| encode(element, numbers.real())).collect::<Vec<u32>>();
        let count = tokens * self.kv_heads * self.dim;
        Sequence {
            tokens,
            kv: [some(count, self.cache), some(count, self.cache)],
            query: some(self.q_heads * self.dim, self.queries),
        }
    }

    fn scale(&self) -> f32 {
        2.0 / (self.dim as f32).sqrt()
    }

    fn sink(&self, head: usize) -> f32 {
        if head == 1 { f32::NEG_INFINITY } else { 0.4 * head as f32 - 1.0 }
    }

    fn reference(&self, sequence: &Sequence) -> Vec<f64> {
        let (dim, group) = (self.dim, self.q_heads / self.kv_heads);
        let first = sequence.tokens.saturating_sub(self.window.map_or(usize::MAX, |window| window as usize));
        let mut out = Vec::new();
        for head in 0..self.q_heads {
            if sequence.tokens == 0 {
                out.extend(vec![0.0; dim]);
                continue;
            }
            let at = |plane: usize, token: usize, i: usize| {
                let bits = sequence.kv[plane][(token * self.kv_heads + head / group) * dim + i];
                decode(self.cache, bits) * f64::from(self.kv_scales[plane])
            };
            let query = |i: usize| decode(self.queries, sequence.query[head * dim + i]);
            let scores: Vec<f64> = (first..sequence.tokens)
                .map(|token| (0..dim).map(|i| query(i) * at(0, token, i)).sum::<f64>() * f64::from(self.scale()))
                .collect();
            let sink = if self.sinks { f64::from(self.sink(head)) } else { f64::NEG_INFINITY };
            let largest = scores.iter().copied().fold(sink, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let total = weights.iter().sum::<f64>() + (sink - largest).exp();
            let value =
                |i| (first..).zip(&weights).map(|(token, weight)| weight * at(1, token, i)).sum::<f64>() / total;
            out.extend((0..dim).map(value));
        }
        out
    }
}

/// What a decode step of some sequences gives, as bits: a cache whose other slots and blocks are NaN, blocks in random order.
fn step(model: &Model, housing: &Housing, sequences: &[&Sequence]) -> Result<Vec<u32>, SimError> {
    let stream = SimDevice::new().stream(housing.seed);
    let (job, held) = prepare(model, housing, sequences, &stream).unwrap();
    let workspace = stream.upload(&vec![0xff; job.workspace_bytes() as usize]);
    // SAFETY: the simulated device checks every access, and nobody else uses the memory.
    unsafe { job.launch(&stream, workspace.ptr()) }?;
    let out = stream.download(&held[0])?;
    Ok(out.chunks_exact(model.queries.bytes() as usize).map(|bytes| common::bits_at(model.queries, bytes, 0)).collect())
}

/// The job, and the memory that it uses: the output first.
fn prepare(
    model: &Model,
    housing: &Housing,
    sequences: &[&Sequence],
    stream: &SimStream,
) -> Result<(DecodeJob, Vec<SimMemory>), JobError> {
    let size = housing.tokens_per_block as usize;
    let longest = sequences.iter().map(|sequence| sequence.tokens).max().unwrap_or(0);
    let stride = longest.div_ceil(size) + 1;
    let needed: usize = sequences.iter().map(|sequence| sequence.tokens.div_ceil(size)).sum();
    let shape = KvShape {
        layers: 2,
        blocks: needed as u32 + 2,
        heads: model.kv_heads as u16,
        tokens_per_block: housing.tokens_per_block,
        run_bytes: vec![model.dim as u32 * model.cache.bytes(); 2],
    };
    let layout = KvLayout::packed(shape.clone(), housing.order.parse().unwrap()).unwrap();
    let mut cache = vec![0xff; (shape.block_bytes() * u64::from(shape.blocks)) as usize];
    let mut free = Numbers::new(housing.seed).shuffled(shape.blocks);
    let mut tables = Vec::new();
    for sequence in sequences {
        // Entries past the last block lead out of the cache.
        let mut table = vec![u32::MAX; stride];
        for (block, entry) in table.iter_mut().enumerate().take(sequence.tokens.div_ceil(size)) {
            *entry = free.pop().unwrap();
            for token in block * size..sequence.tokens.min((block + 1) * size) {
                for (plane, bits) in sequence.kv.iter().enumerate() {
                    for head in 0..model.kv_heads {
                        let at = layout.place(1, BlockId::new(*entry), plane, head as u16, (token % size) as u32);
                        let row = &bits[(token * model.kv_heads + head) * model.dim..][..model.dim];
                        let row = bytes_of(model.cache, row.iter().copied());
                        cache[at.offset as usize..at.offset as usize + row.len()].copy_from_slice(&row);
                    }
                }
            }
        }
        tables.extend(table.iter().flat_map(|entry| entry.to_le_bytes()));
    }
    let queries = bytes_of(model.queries, sequences.iter().flat_map(|sequence| sequence.query.clone()));
    let lengths: Vec<u8> = sequences.iter().flat_map(|sequence| (sequence.tokens as u32).to_le_bytes()).collect();
    let sinks: Vec<u8> = (0..model.q_heads).flat_map(|head| model.sink(head).to_le_bytes()).collect();
    let out = vec![0xff; queries.len()];
    let held: Vec<SimMemory> =
        [&out, &queries, &tables, &lengths, &sinks, &cache].map(|bytes| stream.upload(bytes)).into();
    let pages = DevicePages::new(&layout, model.cache, 1, &SimMemory::regions(&held[5..])).unwrap();
    let batch = DecodeBatch {
        queries: held[1].ptr(),
        out: held[0].ptr(),
        element: model.queries,
        tables: held[2].ptr(),
        table_stride: stride as u32,
        sequences: None,
        lengths: held[3].ptr(),
        longest: longest as u32,
        rows: sequences.len() as u32,
        q_heads: model.q_heads as u32,
    };
    let options = DecodeOptions {
        scale: model.scale(),
        window: model.window.and_then(NonZeroU32::new),
        sinks: model.sinks.then(|| held[4].ptr()),
        kv_scales: model.kv_scales,
    };
    Ok((DecodeJob::new(&pages, &batch, &options)?, held))
}

fn check(name: &str, model: &Model, housing: &Housing, lens: &[usize]) {
    let sequences: Vec<Sequence> = (1..).zip(lens).map(|(seed, &len)| model.sequence(seed, len)).collect();
    let found = step(model, housing, &sequences.iter().collect::<Vec<_>>()).unwrap();
    let want: Vec<f64> = sequences.iter().flat_map(|sequence| model.reference(sequence)).collect();
    // Values are in -1..1: f32 sums, then rounded to the output's type.
    let tolerance = match model.queries {
        Element::F16 => 6e-4,
        Element::Bf16 => 4.5e-3,
        _ => 3e-6,
    } * f64::from(model.kv_scales[1]);
    for (at, (&bits, want)) in found.iter().zip(want).enumerate() {
        let found = decode(model.queries, bits);
        assert!((found - want).abs() < tolerance, "{name}: element {at} is {found}, not {want}");
    }
}

#[test]
fn decode_agrees_with_float64() {
    let heads = |q_heads, kv_heads, dim| Model { q_heads, kv_heads, dim, ..MODEL };
    let fp8 = Model { cache: Element::E4m3, queries: Element::Bf16, kv_scales: [0.7, 1.3], ..MODEL };
    let cases = [
        ("MHA 64", heads(3, 3, 64)),
        ("GQA 2 of 64, f16", Model { cache: Element::F16, queries: Element::F16, ..MODEL }),
        ("MHA 80", heads(2, 2, 80)),
        ("GQA 3 of 96", heads(6, 2, 96)),
        ("GQA 4 of 128", Model { queries: Element::Bf16, ..heads(4, 1, 128) }),
        ("GQA 7 of 128, f16", Model { cache: Element::F16, ..heads(7, 1, 128) }),
        ("GQA 8 of 128", heads(8, 1, 128)),
        ("GQA 12 of 64", heads(12, 1, 64)),
        ("MQA 192", heads(2, 1, 192)),
        ("GQA 5 of 256, f16", Model { cache: Element::F16, ..heads(5, 1, 256) }),
        ("fp8 64", fp8.clone()),
        ("fp8 80, GQA 8", Model { q_heads: 8, kv_heads: 1, dim: 80, ..fp8.clone() }),
        ("fp8 256", Model { q_heads: 1, kv_heads: 1, dim: 256, ..fp8 }),
        ("window 1", Model { window: Some(1), ..MODEL }),
        ("window 33", Model { window: Some(33), ..MODEL }),
        ("sinks", Model { sinks: true, ..MODEL }),
        ("window and sinks", Model { window: Some(70), sinks: true, ..heads(6, 2, 96) }),
    ];
    for (seed, (name, model)) in (1..).zip(cases) {
        let tokens_per_block = [8, 16, 32, 64][seed as usize % 4];
        let order = ["LPBNHC", "BLPNHC", "BLHNPC", "LBPHNC", "LBNHPC"][seed as usize % 5];
        check(name, &model, &Housing { order, tokens_per_block, seed }, &[1, 0, 37, 160]);
    }
}

#[test]
fn a_long_context_is_merged_from_its_segments() {
    for (window, sinks) in [(None, true), (Some(600), false), (Some(512), true)] {
        let model = Model { window, sinks, q_heads: 2, kv_heads: 1, ..MODEL };
        check("long", &model, &PLAIN, &[1100, 512, 513]);
    }
}

#[test]
fn bits_do_not_depend_on_the_batch_the_blocks_the_layout_or_the_schedule() {
    for (q_heads, window) in [(2, None), (8, Some(300))] {
        let model = Model { q_heads, kv_heads: 2, cache: Element::F16, window, sinks: true, ..MODEL };
        let sequences = [3, 700, 64].map(|len| model.sequence(len as u64, len));
        let alone: Vec<u32> =
            sequences.iter().flat_map(|sequence| step(&model, &PLAIN, &[sequence]).unwrap()).collect();
        for (seed, (order, tokens_per_block)) in
            (10..).zip([("LPBNHC", 16), ("BLHNPC", 8), ("LBNHPC", 64), ("BHLPNC", 5), ("LBPHNC", 1)])
        {
            let housing = Housing { order, tokens_per_block, seed };
            let together = step(&model, &housing, &sequences.each_ref()).unwrap();
            assert!(together == alone, "{housing:?}");
        }
    }
}

/// Rows of two sequences in turn, as chunks of their prompts: each gets the bits of its own decode step.
#[test]
fn a_chunk_of_a_prompt_gets_the_bits_of_decode_steps() {
    let model = Model { window: Some(50), sinks: true, ..MODEL };
    let (size, tokens) = (16, 90);
    let whole = [1, 2].map(|seed| model.sequence(seed, tokens));
    let stream = SimDevice::new().stream(5);
    let (_, held) = prepare(&model, &PLAIN, &whole.each_ref(), &stream).unwrap();
    let rows: Vec<(usize, usize)> = (40..tokens + 1).step_by(7).flat_map(|len| [(0, len), (1, len - 3)]).collect();
    let query = |&(sequence, len): &(usize, usize)| model.sequence((1000 * sequence + len) as u64, 0).query;
    let queries = stream.upload(&bytes_of(model.queries, rows.iter().flat_map(query)));
    let numbers = |of: &dyn Fn(&(usize, usize)) -> usize| {
        stream.upload(&rows.iter().flat_map(|row| (of(row) as u32).to_le_bytes()).collect::<Vec<u8>>())
    };
    let (sequences, lengths) = (numbers(&|row| row.0), numbers(&|row| row.1));
    let out = stream.upload(&vec![0xff; queries.bytes()]);
    let shape = KvShape {
        layers: 2,
        blocks: 2 * tokens.div_ceil(size) as u32 + 2,
        heads: model.kv_heads as u16,
        tokens_per_block: size as u32,
        run_bytes: vec![model.dim as u32 * model.cache.bytes(); 2],
    };
    let layout = KvLayout::packed(shape, PLAIN.order.parse().unwrap()).unwrap();
    let pages = DevicePages::new(&layout, model.cache, 1, &SimMemory::regions(&held[5..])).unwrap();
    let batch = DecodeBatch {
        queries: queries.ptr(),
        out: out.ptr(),
        element: model.queries,
        tables: held[2].ptr(),
        table_stride: tokens.div_ceil(size) as u32 + 1,
        sequences: Some(sequences.ptr()),
        lengths: lengths.ptr(),
        longest: tokens as u32,
        rows: rows.len() as u32,
        q_heads: model.q_heads as u32,
    };
    let options = DecodeOptions {
        window: model.window.and_then(NonZeroU32::new),
        sinks: Some(held[4].ptr()),
        ..DecodeOptions::causal(model.scale())
    };
    let job = DecodeJob::new(&pages, &batch, &options).unwrap();
    let workspace = stream.upload(&vec![0xff; job.workspace_bytes() as usize]);
    // SAFETY: the simulated device checks every access, and nobody else uses the memory.
    unsafe { job.launch(&stream, workspace.ptr()) }.unwrap();
    let found: Vec<u32> = stream.download(&out).unwrap().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    for (row, (sequence, len)) in found.chunks_exact(model.q_heads * model.dim).zip(&rows) {
        let width = len * model.kv_heads * model.dim;
        let part = |plane: usize| whole[*sequence].kv[plane][..width].to_vec();
        let alone = Sequence { tokens: *len, kv: [part(0), part(1)], query: query(&(*sequence, *len)) };
        assert!(step(&model, &PLAIN, &[&alone]).unwrap() == row, "sequence {sequence}, length {len}");
    }
}

#[test]
fn a_nan_that_is_seen_is_not_hidden() {
    let mut sequence = MODEL.sequence(1, 40);
    let nan = encode(MODEL.cache, f32::NAN);
    // The key of the first KV head's token 10.
    sequence.kv[0][10 * 2 * 64] = nan;
    let found = step(&MODEL, &PLAIN, &[&sequence]).unwrap();
    let head = |head: usize| found[head * 64..][..64].iter().map(|&bits| f32::from_bits(bits));
    assert!(head(0).all(f32::is_nan) && head(1).all(f32::is_nan));
    assert!(head(2).all(f32::is_finite) && head(3).all(f32::is_finite), "the other KV head has no NaN");
}

#[test]
fn a_block_outside_of_the_cache_is_found() {
    let mut sequence = MODEL.sequence(1, 40);
    let stream = SimDevice::new().stream(1);
    let (job, held) = prepare(&MODEL, &PLAIN, &[&sequence], &stream).unwrap();
    let workspace = stream.upload(&vec![0; job.workspace_bytes() as usize]);
    // The sequence says that it is longer than its table has blocks for.
    sequence.tokens = 49;
    stream.write(&held[3], &49_u32.to_le_bytes());
    // SAFETY: the simulated device checks every access.
    unsafe { job.launch(&stream, workspace.ptr()) }.unwrap();
    let found = stream.synchronize().unwrap_err();
    assert!(matches!(found, SimError::Fault { fault: Fault::OutOfRange { write: false, .. }, .. }), "{found}");
}

#[test]
fn a_wrong_decode_is_refused() {
    let stream = SimDevice::new().stream(1);
    let refused = |model: &Model| {
        let sequence = model.sequence(1, 5);
        prepare(model, &PLAIN, &[&sequence], &stream).err().map(|error| error.to_string()).unwrap_or_default()
    };
    for (message, model) in [
        ("3 query heads cannot share 2 KV heads", Model { q_heads: 3, ..MODEL }),
        ("the cache cannot be f32; use f16, bf16 or e4m3", Model { cache: Element::F32, ..MODEL }),
        ("queries cannot be e4m3; use f32, f16 or bf16", Model { queries: Element::E4m3, ..MODEL }),
        ("head dimension 60 of bf16 is not supported", Model { dim: 60, ..MODEL }),
        ("head dimension 272 of bf16 is not supported", Model { dim: 272, ..MODEL }),
    ] {
        let found = refused(&model);
        assert!(found.contains(message), "{found}");
    }
    let shape = KvShape { layers: 1, blocks: 4, heads: 1, tokens_per_block: 4, run_bytes: vec![128, 128] };
    let layout = KvLayout::packed(shape, "LPBNHC".parse().unwrap()).unwrap();
    let regions = DeviceRegions::new(vec![(DevicePtr::new(8), 1 << 20)]);
    let pages = DevicePages::new(&layout, Element::F16, 0, &regions).unwrap();
    let nowhere = DevicePtr::new(0);
    let batch = DecodeBatch {
        queries: nowhere,
        out: nowhere,
        element: Element::F16,
        tables: nowhere,
        table_stride: 1,
        sequences: None,
        lengths: nowhere,
        longest: 1,
        rows: 1,
        q_heads: 1,
    };
    let error = DecodeJob::new(&pages, &batch, &DecodeOptions::causal(1.0)).unwrap_err();
    assert_eq!(error, JobError::Unaligned { what: "a plane's address", value: 8 });
}
