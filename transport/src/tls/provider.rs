//! The cryptography, if this processor can do it.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

use super::error::TlsError;

/// What the library would panic for if it were missing; `sha`, `vaes` and AVX-512 make it faster where they are there.
pub(super) fn provider() -> Result<Arc<CryptoProvider>, TlsError> {
    match missing() {
        Some(missing) => Err(TlsError::Processor { missing }),
        None => Ok(Arc::new(rustls_graviola::default_provider())),
    }
}

#[cfg(target_arch = "x86_64")]
fn missing() -> Option<&'static str> {
    let needs = [
        ("AES-NI", is_x86_feature_detected!("aes")),
        ("PCLMULQDQ", is_x86_feature_detected!("pclmulqdq")),
        ("SSSE3", is_x86_feature_detected!("ssse3")),
        ("AVX2", is_x86_feature_detected!("avx") && is_x86_feature_detected!("avx2")),
        ("BMI1 and BMI2", is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("bmi2")),
        ("ADX", is_x86_feature_detected!("adx")),
    ];
    needs.into_iter().find_map(|(name, is_there)| (!is_there).then_some(name))
}

#[cfg(target_arch = "aarch64")]
fn missing() -> Option<&'static str> {
    use std::arch::is_aarch64_feature_detected;
    let needs = [
        ("NEON", is_aarch64_feature_detected!("neon")),
        ("AES", is_aarch64_feature_detected!("aes")),
        ("PMULL", is_aarch64_feature_detected!("pmull")),
        ("SHA2", is_aarch64_feature_detected!("sha2")),
    ];
    needs.into_iter().find_map(|(name, is_there)| (!is_there).then_some(name))
}
