"""The section ``model:`` of a recipe."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, SkipValidation

from shardwise.recipe.section import Count, ObjectName, RecipeText, Scalar, Section

Dimension: TypeAlias = Annotated[int, Field(ge=1, le=10_000_000)]


class ModelSpec(Section):
    """The model: a preset, a Hugging Face model, a factory function, or dimensions alone."""

    preset: RecipeText | None = None
    """named dimensions of the native decoder; a dimension that is also given overrides the preset's"""
    hf: RecipeText | None = None
    """folder or Hub id of a language model in Hugging Face format"""
    objective: Literal["causal", "masked", "seq2seq"] = "causal"
    """training objective of a model of hf: causal (the next token), masked (BERT: 15 % of the tokens are hidden) or
    seq2seq (T5: a completion, from the prompt in the encoder)"""
    dropout: bool = False
    """train a model of hf with the dropout that its config.json asks for; false trains without"""
    factory: ObjectName | None = None
    """package.module:function that returns an nn.Module and its loss"""
    arguments: Mapping[str, Annotated[Scalar, SkipValidation]] = Field(default_factory=dict)
    """keyword arguments of the factory"""
    family: Literal["llama", "qwen3", "gpt2"] | None = None
    """architecture of the native decoder"""
    layers: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """number of transformer blocks"""
    width: Dimension | None = None
    """hidden size: the width of the residual stream"""
    heads: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """attention heads; the width must be a multiple, unless head_dim is given"""
    head_dim: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """dimension of an attention head; default: width / heads"""
    kv_heads: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """key/value heads (grouped-query attention); heads must be a multiple"""
    kv_lora_rank: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    """latent attention (DeepSeek): width of the vector that keys and values are made from; default: 0, none"""
    q_lora_rank: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    """the same of queries, with latent attention; default: 0, queries are made from the hidden state"""
    rope_head_dim: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """dimensions of head_dim that rotate, with latent attention"""
    v_head_dim: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """dimension of a value head, with latent attention; default: head_dim"""
    ffn: Dimension | None = None
    """intermediate size of the feed-forward network (MLP)"""
    vocab: Dimension | None = None
    """vocabulary size"""
    context: Count | None = None
    """maximum sequence length of the model"""
    tied: bool | None = None
    """whether the output head shares the embedding's weight"""
    rope_theta: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """base of the rotary position embedding (RoPE)"""
    experts: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """number of experts in a block; a router chooses some of them for each token; 0 for a dense model"""
    experts_per_token: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """experts that the router chooses for a token (top-k); default: 2"""
    expert_ffn: Dimension | None = None
    """intermediate size of an expert; default: ffn"""
    shared_ffn: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    """intermediate size of a shared expert, which computes every token; default: 0, none"""
    dense_layers: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """first blocks that have no experts, but a feed-forward network of ffn; default: 0"""
    router: Literal["softmax", "sigmoid"] | None = None
    """how the router's logits become scores; default: softmax"""
    router_groups: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """number of groups of experts; a token chooses experts from some groups only (DeepSeek-V3); default: 1"""
    groups_per_token: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """groups that a token chooses from, those with the highest sum of their two best scores; default: 1"""
    normalized_weights: bool | None = None
    """whether the weights of a token's experts are divided by their sum; default: true"""
    router_scale: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """factor of the weights of a token's experts; default: 1"""
    router_bias: bool | None = None
    """whether each expert has a bias that counts in the choice alone (balance without a loss); default: false"""
    router_bias_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """by which every step moves router_bias towards a balanced load (Wang et al. 2024); default: 0.001"""
    balance_loss: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """coefficient of the load-balancing loss of each router (Fedus et al. 2021), such as 0.01; default: 0"""
    z_loss: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """coefficient of the z-loss of each router (Zoph et al. 2022), such as 0.001; default: 0"""
