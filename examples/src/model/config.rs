//! The sizes and constants of a Llama.

/// What a Llama's forward pass needs to know beside its weights.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// A short name, for reports and the identity check between nodes.
    pub name: String,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Width inside the feed-forward part.
    pub ffn_width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Numbers in one head.
    pub head_dim: usize,
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// The longest sequence, in tokens.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Numbers at the start of each head that are rotated; even, at most `head_dim`.
    pub rope_dims: usize,
    /// Added to the mean square before its root is taken.
    pub norm_eps: f32,
}

impl ModelConfig {
    /// Width of all query heads together.
    #[must_use]
    pub const fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    #[must_use]
    pub const fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Names the first size that the forward pass cannot work with, and why.
    ///
    /// # Errors
    /// The size's name (as in this struct) and what is wrong with it.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let sizes = [
            ("layers", self.layers, 1 << 10),
            ("width", self.width, 1 << 16),
            ("ffn_width", self.ffn_width, 1 << 18),
            ("heads", self.heads, 1 << 10),
            ("kv_heads", self.kv_heads, 1 << 10),
            ("head_dim", self.head_dim, 1 << 10),
            ("vocab", self.vocab, 1 << 20),
            ("context", self.context, 1 << 24),
        ];
        for (name, size, max) in sizes {
            if size == 0 || size > max {
                return Err((name, format!("{size} is out of range, it must be 1 to {max}")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(("kv_heads", format!("{} does not divide the {} query heads", self.kv_heads, self.heads)));
        }
        for (name, size) in [("width", self.width), ("ffn_width", self.ffn_width), ("head_dim", self.q_width())] {
            if !size.is_multiple_of(32) {
                return Err((name, format!("rows of {size} numbers do not divide into quantisation blocks of 32")));
            }
        }
        if self.rope_dims == 0 || self.rope_dims > self.head_dim || !self.rope_dims.is_multiple_of(2) {
            return Err(("rope_dims", format!("{} is not an even number up to {}", self.rope_dims, self.head_dim)));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0) {
            return Err(("rope_theta", format!("{} is not a positive number", self.rope_theta)));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0) {
            return Err(("norm_eps", format!("{} is not a positive number", self.norm_eps)));
        }
        Ok(())
    }
}
