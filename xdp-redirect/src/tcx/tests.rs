use super::*;
use crate::ConnectionMapSizes;

const SIZES: ConnectionMapSizes =
    ConnectionMapSizes { version: 1, table: 144, tags: (1, 64), entries: (32, 64), usage: (32, 32) };

#[test]
fn the_tcx_programs_load_whichever_functions_the_kernel_has() {
    let connections = ConnectionMaps::open(None, &SIZES).unwrap();
    for (reads, casts) in [(false, false), (true, false), (false, true), (true, true)] {
        let functions = ConnectionFunctions { reads, casts };
        for connections in [None, Some(&connections)] {
            let loaded = TcxPrograms::load_with(&TcxOptions::default(), connections, functions);
            loaded.unwrap_or_else(|error| panic!("{functions:?}, offload {}: {error}", connections.is_some()));
        }
    }
}

#[test]
fn programs_attach_as_tcx_links_and_as_filters() {
    let programs = TcxPrograms::load(&TcxOptions::default(), None).unwrap();
    programs.try_attaching().unwrap();
    let [from_pod, to_pod, ..] = programs.pinned();
    let filters = Method::Clsact(Arc::default());
    filters.try_attaching([(from_pod, BPF_TCX_INGRESS), (to_pod, BPF_TCX_EGRESS)]).unwrap();
}

/// As check_pseudo_btf_id in kernel/bpf/verifier.c of kernels before 6.4, which refuses a function.
fn takes_a_kernel_symbols_address(instructions: &[libbpf_sys::bpf_insn]) -> bool {
    const LOAD_64: u8 = (libbpf_sys::BPF_LD | libbpf_sys::BPF_IMM | libbpf_sys::BPF_DW) as u8;
    let takes =
        |at: &libbpf_sys::bpf_insn| at.code == LOAD_64 && u32::from(at.src_reg()) == libbpf_sys::BPF_PSEUDO_BTF_ID;
    instructions.iter().any(takes)
}

#[test]
fn no_program_takes_the_address_of_a_kernel_function() {
    let mut storage = MaybeUninit::uninit();
    let open = skeleton::TcxSkelBuilder::default().open(&mut storage).unwrap();
    for program in open.open_object().progs() {
        assert!(!takes_a_kernel_symbols_address(program.insns()), "{:?}", program.name());
    }
}
