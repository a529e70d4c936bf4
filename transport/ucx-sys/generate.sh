#!/usr/bin/env bash
# Writes src/generated.rs from UCX's headers: generate.sh INCLUDE_FOLDER
#
# Made with bindgen-cli 0.73.2 (cargo install bindgen-cli), libclang 14 (Debian libclang1-14 and libclang-common-14-dev), and the
# headers of UCX 1.13.1 (Debian libucx-dev 1.13.1-1): the oldest release that the crate accepts, so that a newer header cannot make
# a function necessary that it lacks. Needed only to add a function; the crate needs none of these to build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
include=${1:-/usr/include}

functions='ucp_get_version|ucp_config_(read|modify|release)|ucp_init_version|ucp_cleanup|ucp_context_(query|print_info)'
functions+='|ucp_worker_(create|destroy|progress|get_address|release_address|get_efd|arm|query)'
functions+='|ucp_mem_(map|unmap)|ucp_rkey_(pack|buffer_release|destroy)|ucp_ep_(create|close_nbx|flush_nbx|rkey_unpack|print_info)'
functions+='|ucp_put_nbx|ucp_am_send_nbx|ucp_worker_set_am_recv_handler|ucp_request_free|ucs_status_string'
# Enumerations without a name among the arguments: a field mask is an integer.
types='ucs_memory_type|ucp_(params|worker_params|mem_map_params|ep_params|context_attr|am_handler_param)_field|ucp_feature'
types+='|ucp_worker_flags_t|ucp_ep_close_flags_t|ucp_op_attr_t|ucp_am_cb_flags|ucp_send_am_flags|ucp_am_recv_attr_t|ucp_dt_type|ucp_dt_iov'
variables='UCP_API_(MAJOR|MINOR)'

header=$(mktemp --suffix=.h)
trap 'rm -f "$header"' EXIT
echo '#include <ucp/api/ucp.h>' >"$header"
bindgen "$header" --output src/generated.rs \
    --dynamic-loading Ucp --dynamic-link-require-all \
    --allowlist-function "$functions" --allowlist-type "$types" --allowlist-var "$variables" \
    --opaque-type 'sockaddr.*|ucs_sock_addr|pthread_.*|_IO_.*|FILE' \
    --default-enum-style consts --no-prepend-enum-name --no-doc-comments --merge-extern-blocks --wrap-unsafe-ops \
    --rust-target 1.85 --rust-edition 2024 \
    --raw-line '#![allow(warnings, clippy::all, clippy::undocumented_unsafe_blocks, clippy::multiple_unsafe_ops_per_block, clippy::missing_safety_doc, clippy::allow_attributes, reason = "generated")]' \
    -- -I"$include"
