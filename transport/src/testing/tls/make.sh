#!/usr/bin/env bash
# Makes the certificates of the tests beside this script. Needs OpenSSL 3. Their keys are public: nothing but tests may trust them.
#
#   authority, other   two authorities, which know nothing of each other
#   a, b               nodes of `authority`; their certificates name the engines `a` and `b`
#   a-other, b-other   the same of `other`
#   chained            a node whose certificate comes from an authority below `authority`; it names `a`
#   expired            a node of `authority` whose certificate is over; it names `a`
#
# All others are in force from 2024 to 2123.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

cat >"$work/openssl.cnf" <<EOF
[ca]
default_ca = book
[book]
dir = $work
database = $work/index
rand_serial = yes
new_certs_dir = $work
default_md = sha256
policy = anything
copy_extensions = copy
unique_subject = no
[anything]
commonName = supplied
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:true
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[node]
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
EOF
: >"$work/index"

# key NAME
key() {
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1.key.pem"
}

# sign NAME PROFILE SIGNER FROM TO [SUBJECT-ALT-NAME]
sign() {
    local request="$work/$1.csr"
    openssl req -new -config "$work/openssl.cnf" -key "$1.key.pem" -subj "/CN=kvferry test $1" \
        ${6:+-addext "subjectAltName=$6"} -out "$request" 2>"$work/log" || { cat "$work/log" >&2; return 1; }
    local signer=(-keyfile "$3.key.pem" -cert "$3.pem")
    [ "$1" = "$3" ] && signer=(-selfsign -keyfile "$1.key.pem")
    openssl ca -batch -notext -config "$work/openssl.cnf" -extensions "$2" "${signer[@]}" \
        -startdate "$4" -enddate "$5" -in "$request" -out "$1.pem" 2>"$work/log" || { cat "$work/log" >&2; return 1; }
}

from=20240101000000Z
to=21231231000000Z
for name in authority other; do
    key $name
    sign $name authority $name $from $to
done
for name in a b; do
    key $name
    sign $name node authority $from $to DNS:$name
    key $name-other
    sign $name-other node other $from $to DNS:$name
done
key expired
sign expired node authority $from 20240201000000Z DNS:a
key below
sign below authority authority $from $to
key chained
sign chained node below $from $to DNS:a
cat below.pem >>chained.pem
# Nobody signs with them again.
rm below.pem ./*below.key.pem authority.key.pem other.key.pem
